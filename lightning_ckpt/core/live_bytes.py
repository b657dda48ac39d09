"""Live tensor bytes in host memory, followed operation by operation."""

import dataclasses
import os
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ckpt.core._torch import TorchDispatchMode, coo_parts
from lightning_ckpt.core.peak import PeakTracker


class LiveBytes(PeakTracker):
    """Live bytes of tensors in host memory, by a dispatch mode that is on while not paused."""

    def __init__(self) -> None:
        self._mode = _CountingMode()

    def resume(self, *holders: Any) -> None:
        self._mode.count(holders)
        self._mode.enter()

    def pause(self) -> None:
        self._mode.leave()

    def reset_peak(self, *holders: Any) -> None:
        self._mode.count(holders)
        self._mode.peak = self._mode.live

    def stop(self) -> None:
        self._mode.leave()
        self._mode.forget()

    @property
    def peak_bytes(self) -> int:
        return self._mode.peak

    @property
    def current_bytes(self) -> int:
        return self._mode.live


class _Counted(weakref.ref[torch.UntypedStorage]):
    """A storage that is counted in, and by how many bytes."""

    __slots__ = ("key", "num_bytes")
    key: int
    num_bytes: int


class _CountingMode(TorchDispatchMode):
    """Counts storages while it is on. An error in here would end the step that it measures."""

    # Without it torch refuses higher-order operators (`torch.cond`, flex attention) in here.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let a compiled function that `_find_compiled` could not see run compiled: the figure then
        misses its temporaries, but the training is the same. Older torch does not ask.
        """
        return True

    def __init__(self) -> None:
        super().__init__()
        self.live = 0
        self.peak = 0
        self.on = False
        # By `id`, which is stable: torch keeps the Python object as long as the storage lives.
        self._counted: dict[int, _Counted] = {}

    def enter(self) -> None:
        if self not in _entered:
            self.__enter__()
            _entered.append(self)
        self.on = True

    def leave(self) -> None:
        """Torch takes off whatever mode is on top, so two trackers that end in the order in which
        they began would take off each other: the lower one stays there, idle, until it is on top.
        """
        self.on = False
        while _entered and not _entered[-1].on:
            _entered.pop().__exit__(None, None, None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # DTensor and the like go first, and come back here with operations on plain tensors.
        if types and any(map(_wraps_tensors, types)):
            return NotImplemented
        result = func(*args, **kwargs) if kwargs else func(*args)
        if self.on:
            # Arguments too: what nothing named and nothing made in here is met as an argument.
            self._see_all(args)
            if kwargs:
                self._see_all(kwargs.values())
            if isinstance(result, Tensor):
                self._see(result)
            elif isinstance(result, (tuple, list)):
                self._see_all(result)
        return result

    def count(self, holder: Any) -> None:
        for tensor in _tensors_in(holder, {}):
            self._see(tensor)

    def forget(self) -> None:
        self._counted.clear()  # a dead weak reference does not call back

    def _see_all(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, Tensor):
                self._see(value)
            elif isinstance(value, (tuple, list)):
                self._see_all(value)

    def _see(self, tensor: Tensor) -> None:
        try:
            storage = tensor.untyped_storage()
        except RuntimeError:  # sparse: its parts have storages; opaque layouts: unknown
            self._see_all(_parts(tensor))
            return
        num_bytes = storage.nbytes()
        known = self._counted.get(id(storage))
        if known is not None and known.num_bytes == num_bytes:
            return
        if known is None:
            if storage.device.type != "cpu":  # fake and meta tensors too
                return
            known = self._counted[id(storage)] = _Counted(storage, self._died)
            known.key = id(storage)
            known.num_bytes = 0
        self.live += num_bytes - known.num_bytes
        known.num_bytes = num_bytes
        self.peak = max(self.peak, self.live)

    def _died(self, dead: _Counted) -> None:
        del self._counted[dead.key]
        self.live -= dead.num_bytes


_entered: list[_CountingMode] = []  # those on torch's stack, the lowest first


def _idle_after_fork() -> None:
    """A process that is forked in here (a data loader's worker) has its own copy of the modes."""
    for mode in _entered:
        mode.on = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle_after_fork)


def _wraps_tensors(kind: type) -> bool:
    """Whether it is a wrapper subclass, by the protocol that `torch.compile` asks of them."""
    return hasattr(kind, "__tensor_flatten__")


def _parts(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a sparse tensor is made of."""
    if tensor.layout == torch.sparse_coo:
        return list(coo_parts(tensor))
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _tensors_in(holder: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    if id(holder) in seen:
        return
    seen[id(holder)] = holder
    if isinstance(holder, Tensor):
        yield from _plain(holder)
        if holder.is_leaf and holder.grad is not None:
            yield from _plain(holder.grad)
        return
    for item in _items(holder):
        yield from _tensors_in(item, seen)


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """A wrapper subclass (DTensor) has the size of the whole; what it holds here is inside it."""
    if _wraps_tensors(type(tensor)):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, Tensor):
                yield from _plain(inner)
    else:
        yield tensor


def _items(holder: Any) -> Iterator[Any]:
    if isinstance(holder, nn.Module):
        yield from holder.parameters()
        yield from holder.buffers()
    elif isinstance(holder, Optimizer):
        yield holder.param_groups
        yield holder.state
    elif isinstance(holder, Mapping):
        yield from holder.values()
    elif isinstance(holder, (Sequence, Set)) and not isinstance(holder, (str, bytes)):
        yield from holder
    elif dataclasses.is_dataclass(holder) and not isinstance(holder, type):
        yield from vars(holder).values()
