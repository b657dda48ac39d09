"""When things happen on a device."""

import statistics
import time
from typing import Any, NamedTuple

import torch
from torch.nn.functional import linear
from torch.utils.flop_counter import flop_registry
from typing_extensions import override

from lightning_ckpt.core.arguments import tensors_of
from lightning_ckpt.core.saving import Saving, narrow_contexts

_NUM_TRIALS = 25
_A_SAVING: Saving = "recompute_saving"
_MOST_BYTES = 8 * 2**20  # between operations: more than the caches of a core hold


class Overhead(NamedTuple):
    """Seconds that a partly recomputed block loses, in forward and again in the recompute.

    Attributes:
        operation: for each operation.
        kept: for each whose result it keeps.
    """

    operation: float
    kept: float


NONE = Overhead(0.0, 0.0)


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

    def overhead(self, num_bytes: float) -> Overhead:
        """What the contexts of a partly recomputed block take of the host's time. The clock of an
        accelerator does not see it, and there it counts as nothing.

        Args:
            num_bytes: that an operation gives. What it reads and writes goes through the caches
                and drives out what Python had there: with large tensors the contexts take six
                times as long as with small ones.
        """
        if not self._on_host:
            return NONE
        between = torch.zeros(min(int(2 * num_bytes), _MOST_BYTES), dtype=torch.uint8, device="cpu")
        plain, under = (_seconds(saving, between) for saving in (None, _A_SAVING))
        return Overhead(*(max(0.0, more - less) for more, less in zip(under, plain, strict=True)))

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
    def overhead(self, num_bytes: float) -> Overhead:
        return NONE

    @override
    def advance(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        count = flop_registry.get(getattr(operation, "overloadpacket", None))
        flops = count(*args, **kwargs, out_val=result) if count else 0
        num_bytes = 0
        if not getattr(operation, "is_view", False):
            num_bytes = sum(tensor.nbytes for tensor in tensors_of((args, kwargs, result)))
        self._now += max(flops / self._flops_per_second, num_bytes / self._bytes_per_second)


def _seconds(saving: Saving | None, between: torch.Tensor) -> tuple[float, float]:
    """The times of a small sum and of a small product under the contexts of `saving`, where others
    went over the tensor `between`; the medians of some."""
    small, weight = torch.zeros(1, 1, 1, device="cpu"), torch.zeros(1, 1, device="cpu")
    sums: list[float] = []
    products: list[float] = []
    keeping = None if saving is None else narrow_contexts(saving)[0]

    def once(times: list[float], operation: Any, other: torch.Tensor) -> None:
        begin = time.perf_counter()
        operation(small, other)
        times.append(time.perf_counter() - begin)

    for _ in range(_NUM_TRIALS):
        for call in ((sums, torch.add, small), (products, linear, weight)):
            between.add_(1)
            once(*call) if keeping is None else keeping.run(once, *call)
    return statistics.median(sums), statistics.median(products)
