"""Peak memory of a stretch of training: live tensor bytes on CPU, the allocator's peak on a device.

On CPU nothing keeps such a figure (resident memory does not: the allocator keeps freed pages, so a
second step shows no new peak). So a dispatch mode looks at what each operation returns, counts each
storage once, and a weak reference on the storage tells of its end. Views, in-place operations,
`no_grad`, backward and the recompute of a checkpoint need nothing special, and equal steps give
the same figure to the byte. What it does not see: memory that an operation takes and gives back
inside its kernel; storages that nothing named and no operation touched; and the new size of a
storage that was resized by itself (sharding strategies do so), until an operation touches it.

    with track_peak(model, optimizer, batch) as tracker:
        training_step()
    print(tracker.peak_bytes / 2**20, "MiB")
"""

import dataclasses
import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ckpt.core._torch import OptimizedModule, TorchDispatchMode


class PeakUnavailable(RuntimeError):
    """No honest figure can be had here; the message says why."""


class PeakTracker(ABC):
    """The peak of allocated bytes between `start` and `stop`, without the stretches in between
    that lie in `pause` ... `resume`. It starts paused, and each call may be made twice.

    `holders` are tensors that exist already, or what holds them: modules (with gradients),
    optimizers (with states), and dicts, lists, tuples, sets and dataclasses of such.
    """

    @abstractmethod
    def resume(self, *holders: Any) -> None:
        """Measure from here on, with the tensors in `holders` counted in."""

    @abstractmethod
    def pause(self) -> None:
        """Leave what comes out of the peak. What is freed meanwhile is not missed."""

    @abstractmethod
    def reset_peak(self, *holders: Any) -> None:
        """Let the peak start again, at the bytes that are live now."""

    @abstractmethod
    def stop(self) -> None:
        """Stop for good and forget all tensors. The figures can still be read."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The largest number of bytes that were live at once since the last reset."""

    @property
    @abstractmethod
    def current_bytes(self) -> int:
        """The bytes that are live now, as far as they are known."""


def peak_tracker(device: torch.device | str, *modules: nn.Module) -> PeakTracker:
    """Make the tracker that fits `device`.

    Args:
        device: where the training runs.
        modules: all that will be run while it measures.

    Raises:
        PeakUnavailable: the device keeps no peak (MPS, devices that torch does not know), or it
            is a CPU and something in `modules` is compiled: under a dispatch mode such code runs
            uncompiled, and stays so when it is called there for the first time, or runs unseen.
    """
    device = torch.device(device)
    if device.type != "cpu":
        return AllocatorPeak(device)
    for module in modules:
        if compiled := _find_compiled(module):
            raise PeakUnavailable(
                f"{compiled} is compiled, and on a CPU the tensors of compiled code cannot be "
                "followed; measure without `torch.compile`"
            )
    return LiveBytes()


@contextmanager
def track_peak(*holders: Any, device: torch.device | str = "cpu") -> Iterator[PeakTracker]:
    """Measure the peak of a block of code, with the tensors in `holders` counted in.

    Raises:
        PeakUnavailable: see `peak_tracker`.
    """
    modules = [holder for holder in holders if isinstance(holder, nn.Module)]
    tracker = peak_tracker(device, *modules)
    try:
        tracker.reset_peak(*holders)
        tracker.resume()
        yield tracker
    finally:
        tracker.stop()


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
        return [tensor._indices(), tensor._values()]
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


def _find_compiled(module: nn.Module) -> str | None:
    """Name the first compiled part of `module`, as far as it can be seen from outside."""
    for name, part in module.named_modules():
        own = list(vars(part).values())
        of_classes = [value for kind in _own_classes(part) for value in vars(kind).values()]
        if isinstance(part, OptimizedModule) or any(map(_is_compiled, own + of_classes)):
            return f"{name or 'the model'} ({type(part).__name__})"
    return None


def _own_classes(module: nn.Module) -> list[type]:
    """The classes of `module` that are not torch's own."""
    return [kind for kind in type(module).__mro__ if kind.__module__.split(".")[0] != "torch"]


def _is_compiled(value: Any) -> bool:
    """Whether `value` is a function or bound method that `torch.compile` made."""
    return (
        callable(value)
        and hasattr(value, "_torchdynamo_orig_callable")
        and not getattr(value, "_torchdynamo_disable", False)
    )


class _Counters(Protocol):
    def memory_allocated(self, device: Any, /) -> int: ...

    def max_memory_allocated(self, device: Any, /) -> int: ...

    def reset_peak_memory_stats(self, device: Any, /) -> None: ...


class AllocatorPeak(PeakTracker):
    """The peak that the allocator of an accelerator keeps, which everyone in the process shares.

    It is reset by `reset_peak`, and by `resume` when the pause had a higher peak than all before:
    others who read it see no more resets than that. Their resets cost nothing here, as long as they
    lie in a pause.

    Args:
        device: the accelerator.
        counters: what to read, by default what torch has for `device`.

    Raises:
        PeakUnavailable: there is nothing that keeps a peak for `device`.
    """

    def __init__(self, device: torch.device, counters: _Counters | None = None) -> None:
        self._device = device
        self._counters = _device_counters(device) if counters is None else counters
        self._peak = 0
        self._paused = True

    def resume(self, *holders: Any) -> None:
        if self._paused and self._counters.max_memory_allocated(self._device) > self._peak:
            self._counters.reset_peak_memory_stats(self._device)
        self._paused = False

    def pause(self) -> None:
        self._peak = self.peak_bytes
        self._paused = True

    def reset_peak(self, *holders: Any) -> None:
        self._counters.reset_peak_memory_stats(self._device)
        self._peak = self.current_bytes

    def stop(self) -> None:
        self.pause()

    @property
    def peak_bytes(self) -> int:
        if self._paused:
            return self._peak
        return max(self._peak, self._counters.max_memory_allocated(self._device))

    @property
    def current_bytes(self) -> int:
        return self._counters.memory_allocated(self._device)


def _device_counters(device: torch.device) -> _Counters:
    if device.type == "mps":  # it counts what is allocated now and what the driver holds, no peak
        raise PeakUnavailable("torch keeps no peak of allocated memory on MPS")
    accelerator = torch.accelerator.current_accelerator()
    current = accelerator is not None and accelerator.type == device.type
    # `torch.accelerator` has these since torch 2.9; before, each device's module has them.
    if current and hasattr(torch.accelerator, "max_memory_allocated"):
        return torch.accelerator
    try:
        counters: Any = torch.get_device_module(device)
    except RuntimeError as error:
        raise PeakUnavailable(f"torch has no module for the device {device}") from error
    if not hasattr(counters, "max_memory_allocated"):
        raise PeakUnavailable(f"torch keeps no peak of allocated memory on {device}")
    return counters
