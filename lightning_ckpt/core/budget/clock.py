"""When things happen on a device."""

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_ckpt.core.arguments import tensors_of
from lightning_ckpt.core.saving import Saving, contexts

_NUM_OPERATIONS = 50
# In a row Python's own data stay in the caches; between a step's operations they do not. A step of
# 12 Llama blocks of width 256 lost twice as much for each operation as they do in a row.
_IN_A_STEP = 2
_A_SAVING: Saving = "recompute_saving"


class Clock:
    """Host time on a CPU; on an accelerator the time at which its stream gets there.

    Args:
        device: where the training runs.
    """

    def __init__(self, device: torch.device | str) -> None:
        self.device = torch.device(device)
        self._on_host = self.device.type == "cpu"

    def mark(self) -> Any:
        """This moment."""
        if self._on_host:
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """The time between two moments; on an accelerator only after `synchronize`."""
        return end - begin if self._on_host else begin.elapsed_time(end) / 1000

    def synchronize(self) -> None:
        """Wait until all moments so far have come."""
        if not self._on_host:
            torch.accelerator.synchronize(self.device)

    def overhead_seconds(self) -> float:
        """What torch's selective contexts take of the host's time for an operation. The clock of
        an accelerator does not see it, and there it counts as nothing."""
        if not self._on_host:
            return 0.0
        plain, kept = ([_small_operations(name) for _ in range(3)] for name in (None, _A_SAVING))
        return _IN_A_STEP * max(0.0, min(kept) - min(plain)) / (2 * _NUM_OPERATIONS)

    def advance(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Called after each operation, for clocks that go by what is computed."""


class CostClock(Clock):
    """A clock that goes by what is computed, for tensors without values: the longer of the time
    that a device would need to multiply and to read and write.

    Args:
        device: what the tensors say they are on.
        flops_per_second: of matrix products.
        bytes_per_second: of the device's memory.
    """

    def __init__(
        self, device: torch.device | str, flops_per_second: float, bytes_per_second: float
    ) -> None:
        super().__init__(device)
        self._flops_per_second = flops_per_second
        self._bytes_per_second = bytes_per_second
        self._now = 0.0

    @override
    def mark(self) -> float:
        return self._now

    @override
    def seconds(self, begin: Any, end: Any) -> float:
        return end - begin

    @override
    def synchronize(self) -> None:
        pass

    @override
    def overhead_seconds(self) -> float:
        return 0.0

    @override
    def advance(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        count = flop_registry.get(getattr(operation, "overloadpacket", None))
        flops = count(*args, **kwargs, out_val=result) if count else 0
        num_bytes = 0
        if not getattr(operation, "is_view", False):
            num_bytes = sum(tensor.nbytes for tensor in tensors_of((args, kwargs, result)))
        self._now += max(flops / self._flops_per_second, num_bytes / self._bytes_per_second)


def _small_operations(saving: Saving | None) -> float:
    """The time of some operations, done twice, under the contexts of `saving`."""
    tensor = torch.zeros(1)
    begin = time.perf_counter()
    for context in (nullcontext(), nullcontext()) if saving is None else contexts(saving):
        with context:
            for _ in range(_NUM_OPERATIONS):
                tensor + tensor
    return time.perf_counter() - begin
