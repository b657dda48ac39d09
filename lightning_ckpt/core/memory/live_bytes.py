"""Live tensor bytes in host memory, followed operation by operation."""

import weakref
from collections.abc import Iterable
from time import time_ns
from typing import Any

import torch
from torch import Tensor

from lightning_ckpt.core.memory.breakdown import Event
from lightning_ckpt.core.memory.holders import parts_of, storages_of, tensors_in, wraps_tensors
from lightning_ckpt.core.memory.mode_stack import StackedMode
from lightning_ckpt.core.memory.peak import PeakTracker


class LiveBytes(PeakTracker):
    """Live bytes of tensors in host memory, by a dispatch mode that is on while not paused.

    Args:
        storage_devices: where the storages lie that are counted; "meta" for fake tensors.
    """

    def __init__(self, *storage_devices: str) -> None:
        self._mode = _CountingMode(storage_devices or ("cpu",))

    def resume(self, *holders: Any) -> None:
        self._mode.count(holders)
        self._mode.enter()

    def pause(self) -> None:
        self._mode.leave()

    def reset_peak(self, *holders: Any) -> None:
        self._mode.count(holders)
        self._mode.peak = self._mode.live

    def backdate(self) -> None:
        self._mode.is_backdating = True

    @property
    def met_bytes(self) -> int:
        return self._mode.met

    def stop(self) -> None:
        self._mode.leave()
        self._mode.forget()

    @property
    def peak_bytes(self) -> int:
        return self._mode.peak

    @property
    def current_bytes(self) -> int:
        return self._mode.live

    def record(self) -> list[Event]:
        """Keep what comes and goes from here on, in the list that is returned, which begins with
        what is live now."""
        self._mode.events = self._mode.live_events()
        return self._mode.events

    def end_record(self) -> None:
        """Keep no more events."""
        self._mode.events = None

    def name(self, kind: str, tensor: Tensor) -> None:
        """Say what a plain tensor is, and count it in if it is new."""
        self._mode.see(tensor)
        for storage in storages_of(tensor):
            if (known := self._mode.known(storage)) is not None:
                known.kind = kind


class _Counted(weakref.ref[torch.UntypedStorage]):
    """A storage that is counted in, and by how many bytes."""

    __slots__ = ("key", "kind", "num_bytes")
    key: int
    kind: str | None
    num_bytes: int


class _CountingMode(StackedMode):
    """Counts storages while it is on. An error in here would end the step that it measures."""

    def __init__(self, storage_devices: tuple[str, ...]) -> None:
        super().__init__()
        self.storage_devices = storage_devices
        self.live = 0
        self.peak = 0
        self.met = 0
        self.is_backdating = False
        self.events: list[Event] | None = None
        # By `id`, which is stable: torch keeps the Python object as long as the storage lives.
        self._counted: dict[int, _Counted] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DTensor and the like go first, and come back here with operations on plain tensors.
        if types and any(map(wraps_tensors, types)):
            return NotImplemented
        result = func(*args, **kwargs) if kwargs else func(*args)
        if self.on and func not in _VIEWS:
            # Arguments too: what nothing named and nothing made in here is met as an argument.
            self._see_all(args, is_met=True)
            if kwargs:
                self._see_all(kwargs.values(), is_met=True)
            if isinstance(result, Tensor):
                self.see(result)
            elif isinstance(result, (tuple, list)):
                self._see_all(result)
        return result

    def count(self, holder: Any) -> None:
        for tensor in tensors_in(holder):
            self.see(tensor)

    def forget(self) -> None:
        self._counted.clear()  # a dead weak reference does not call back

    def _see_all(self, values: Iterable[Any], *, is_met: bool = False) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self.see(value, is_met=is_met)
            elif isinstance(value, (tuple, list)):
                self._see_all(value, is_met=is_met)

    def see(self, tensor: Tensor, *, is_met: bool = False) -> None:
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # sparse: its parts have storages; opaque layouts: unknown
            self._see_all(parts_of(tensor), is_met=is_met)
            return
        num_bytes = storage.nbytes()
        known = self._counted.get(id(storage))
        if known is not None and known.num_bytes == num_bytes:
            return
        if known is None:
            if storage.device.type not in self.storage_devices:
                return
            known = self._counted[id(storage)] = _Counted(storage, self._died)
            known.key, known.kind, known.num_bytes = id(storage), None, 0
            if is_met and self.is_backdating:
                self.met += num_bytes
                self.peak += num_bytes  # it was there then, too
        self._change(known, num_bytes - known.num_bytes)
        known.num_bytes = num_bytes

    def known(self, storage: torch.UntypedStorage) -> _Counted | None:
        return self._counted.get(id(storage))

    def live_events(self) -> list[Event]:
        now = time_ns()
        return [(counted, counted.num_bytes, now) for counted in self._counted.values()]

    def _died(self, dead: _Counted) -> None:
        if self._counted.get(dead.key) is dead:  # not forgotten meanwhile
            del self._counted[dead.key]
            self._change(dead, -dead.num_bytes)

    def _change(self, counted: _Counted, num_bytes: int) -> None:
        self.live += num_bytes
        if self.live > self.peak:
            self.peak = self.live
        if self.events is not None:
            self.events.append((counted, num_bytes, time_ns()))


aten = torch.ops.aten

# Half of all operations of a step only look at a storage in another way, and there is nothing to
# see in them. (What nothing named is seen when something reads the view.) `is_view` of an operator
# would not do: in inference mode `reshape` comes here, which may copy.
_VIEWS = frozenset(
    (
        aten.alias.default,
        aten.as_strided.default,
        aten.detach.default,
        aten.expand.default,
        aten.permute.default,
        aten.select.int,
        aten.slice.Tensor,
        aten.split.Tensor,
        aten.split_with_sizes.default,
        aten.squeeze.dim,
        aten.t.default,
        aten.transpose.int,
        aten.unbind.int,
        aten.unsqueeze.default,
        aten.view.default,
    )
)
