"""A pretended device whose work may be as late as it likes, and a training on it.

It is as strict as a real one: time is only kept by events that were made for it, and told of those
that have come; a copy belongs to the stream that is current, lets the host wait unless it was told
otherwise, and writes to memory that is another's by then if nobody made a stream wait.
"""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from lightning_ckpt.core.offload.schedule import Scheduler
from lightning_ckpt.core.offload.slots import Place
from lightning_ckpt.core.offload.targets import Target, as_bytes

NUM_BYTES = 512
DEVICE = torch.device("cuda", 0)

_empty, _copy, _device_of = torch.empty, Tensor.copy_, Tensor.device


class FakeEvent:
    def __init__(self, device: Any = None, *, enable_timing: bool = False) -> None:
        self.is_done = False
        self.gpu: FakeGpu | None = None  # once it is recorded
        self._is_timed = enable_timing
        self._time = 0.0

    def query(self) -> bool:
        return self.is_done

    def come(self) -> None:
        assert self.gpu is not None
        self._time, self.is_done = self.gpu.now, True

    def synchronize(self) -> None:
        assert self.gpu is not None
        while not self.is_done:
            assert sum(stream.step() for stream in self.gpu.streams), "it would wait for ever"

    def elapsed_time(self, other: "FakeEvent") -> float:
        """In milliseconds."""
        if not (self._is_timed and other._is_timed):
            raise RuntimeError("both events must be created with enable_timing=True")
        if not (self.is_done and other.is_done):
            raise RuntimeError("both events must be recorded and completed")
        return other._time - self._time


class FakeStream:
    """Work in order, done when `step` is called."""

    def __init__(self, gpu: "FakeGpu", device: Any = None) -> None:
        self.gpu = gpu
        self.device = device
        self._work: deque[tuple[FakeEvent | None, Callable[[], Any]]] = deque()
        gpu.streams.append(self)

    def add(self, work: Callable[[], Any], after: FakeEvent | None = None) -> None:
        self._work.append((after, work))

    def step(self) -> bool:
        """Do the next piece, if it waits for nothing."""
        if not self._work or (self._work[0][0] is not None and not self._work[0][0].is_done):
            return False
        self._work.popleft()[1]()
        return True

    def query(self) -> bool:
        return not self._work

    def synchronize(self) -> None:
        while self._work:
            assert sum(stream.step() for stream in self.gpu.streams), "it would wait for ever"

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
        event.gpu = self.gpu
        self.add(event.come)
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.add(lambda: None, after=event)

    def __enter__(self) -> None:
        self.gpu.stack.append(self)

    def __exit__(self, *args: Any) -> None:
        self.gpu.stack.pop()


class Copy(NamedTuple):
    """A copy that was given to a stream."""

    stream: FakeStream
    is_out: bool
    is_pinned: bool


class FakeGpu:
    """Streams, and memory that goes to other work of its own stream, and is given out again, as
    soon as the program lets go of it. Copies take a millisecond each, and all else no time."""

    def __init__(self, choose: Callable[[int], int], device: torch.device = DEVICE) -> None:
        self.choose = choose
        self.device = device
        self.fast = choose(2)
        self.now = 0.0
        self.streams: list[FakeStream] = []
        self.stack = [FakeStream(self)]
        self.free: list[tuple[bytearray, FakeStream]] = []
        self.known: dict[int, bytearray] = {}  # by address: they live as long as this does
        self.owners: dict[int, object] = {}  # as the program has it, by memory of the device
        self.owners_by_now: dict[int, object] = {}  # as far as the streams have come
        self.users: dict[int, list[FakeStream]] = {}  # of whom the allocator was told
        self.pinned: dict[int, Tensor] = {}
        self.copies: list[Copy] = []
        self.wrong: list[str] = []

    @property
    def current(self) -> FakeStream:
        return self.stack[-1]

    def progress(self) -> None:
        """Some work is done, most of it on one stream in some trainings."""
        for _ in range(self.choose(12)):
            index = self.choose(len(self.streams))
            self.streams[index if self.choose(9) == 0 else self.fast % (index + 1)].step()

    def finish(self) -> None:
        while sum(stream.step() for stream in self.streams):
            pass
        assert not any(stream._work for stream in self.streams), "streams wait for each other"

    # --- memory

    def empty(self, *args: Any, **values: Any) -> Tensor:
        """In place of `torch.empty`."""
        device = torch.device(values.get("device") or "cpu")
        if device == self.device and device.type != "cpu":
            return self.allocate(*args)
        if not values.pop("pin_memory", False):
            return _empty(*args, **values)
        tensor = _empty(*args, **values)
        self.pinned[tensor.data_ptr()] = tensor
        return tensor

    def allocate(self, num_bytes: int) -> Tensor:
        home = self.current
        found = next((pair for pair in self.free if pair[1] is home), None)
        if found is not None:
            self.free.remove(found)
        memory, owner = found[0] if found is not None else bytearray(num_bytes), object()
        self.owners[id(memory)] = owner
        home.add(lambda: self.owners_by_now.update({id(memory): owner}))
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.known[tensor.data_ptr()] = memory
        weakref.finalize(tensor.untyped_storage(), self.let_go, memory, home)
        return tensor

    def let_go(self, memory: bytearray, home: FakeStream) -> None:
        """It is other work's, once the streams that the allocator was told of have come to it."""
        users = self.users.pop(id(memory), [])

        def come(user: FakeStream) -> None:
            users.remove(user)
            if not users:
                self.reuse(memory, home)

        for user in list(users):
            user.add(lambda user=user: come(user))  # type: ignore[misc]
        if not users:
            self.reuse(memory, home)

    def reuse(self, memory: bytearray, home: FakeStream) -> None:
        other = torch.frombuffer(memory, dtype=torch.uint8)
        home.add(lambda: self.owners_by_now.pop(id(memory)))
        home.add(lambda: other.fill_(255))
        home.add(lambda: self.look(other, 255))
        self.free.append((memory, home))

    def record_stream(self, tensor: Tensor, stream: FakeStream) -> None:
        self.users.setdefault(id(self.memory_of(tensor)), []).append(stream)

    def memory_of(self, tensor: Tensor) -> bytearray | None:
        return self.known.get(tensor.untyped_storage().data_ptr())

    def is_here(self, tensor: Tensor) -> bool:
        """Whether it is in memory of the device."""
        return id(self.memory_of(tensor)) in self.owners

    def device_of(self, tensor: Tensor) -> torch.device:
        return self.device if self.is_here(tensor) else _device_of.__get__(tensor)

    def raw(self, tensor: Tensor) -> Tensor:
        """The same memory: work that is waiting keeps no tensor alive."""
        memory = self.memory_of(tensor)
        return tensor if memory is None else torch.frombuffer(memory, dtype=torch.uint8)

    # --- work

    def current_stream(self, device: torch.device | None = None) -> FakeStream:
        assert device in (None, self.device)
        return self.current

    def new_stream(self, device: torch.device) -> FakeStream:
        assert device == self.device
        return FakeStream(self, device)

    def copy(self, into: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        """In place of `Tensor.copy_`."""
        is_out = self.is_here(source)
        if not is_out and not self.is_here(into):
            return _copy(into, source)
        host = into if is_out else source
        is_pinned = host.untyped_storage().data_ptr() in self.pinned
        self.copies.append(Copy(self.current, is_out, is_pinned))
        self.current.add(self._copying(self.raw(into), self.raw(source), id(self.memory_of(into))))
        if not non_blocking:
            self.current.synchronize()
        return into

    def _copying(self, into: Tensor, source: Tensor, memory: int) -> Callable[[], None]:
        owner = self.owners.get(memory)

        def work() -> None:
            if self.owners_by_now.get(memory) is not owner:
                self.wrong.append("a copy into memory that is another's by now")
            self.now += 1.0
            _copy(into, source)

        return work

    def look(self, tensor: Tensor, value: int) -> None:
        if not (tensor == value).all():
            self.wrong.append(f"{int(tensor[0])} in place of {value}")


@contextmanager
def on(gpu: FakeGpu) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_stream", gpu.current_stream)
        patch.setattr(torch, "Stream", gpu.new_stream)
        patch.setattr(torch, "Event", FakeEvent)
        patch.setattr(torch, "empty", gpu.empty)
        patch.setattr(Tensor, "device", property(gpu.device_of))
        patch.setattr(Tensor, "record_stream", lambda *pair: gpu.record_stream(*pair))
        patch.setattr(Tensor, "copy_", lambda into, source, **v: gpu.copy(into, source, **v))
        yield


class Training:
    """Blocks that save one tensor each."""

    def __init__(self, gpu: FakeGpu, target: Target, prefetch: int, keep_last: int) -> None:
        self.gpu = gpu
        self.scheduler = Scheduler(target, prefetch, keep_last)
        self.saved: list[tuple[Place, int]] = []
        self.value = 0

    def forward(self) -> None:
        value = self.value = self.value % 250 + 1
        tensor = self.gpu.allocate(NUM_BYTES)
        memory = self.gpu.raw(tensor)
        self.gpu.current.add(lambda: memory.fill_(value))
        self.saved.append((self.scheduler.save(self.scheduler.open_call(), tensor), value))
        self.scheduler.close_call()

    def leave(self, num: int = 1) -> int:
        """So many forwards, whose copies out have ended; says how much memory is free then."""
        for _ in range(num):
            self.forward()
        self.gpu.finish()
        self.scheduler.look()
        return len(self.gpu.free)

    def backward(self, index: int) -> None:
        if self.saved:
            place, value = self.saved.pop(index % len(self.saved))
            storage = self.scheduler.use(place)
            assert self.gpu.is_here(as_bytes(storage)), "it came back to the host"
            memory = self.gpu.raw(as_bytes(storage))
            self.gpu.current.add(lambda: self.gpu.look(memory, value))

    def drop(self, index: int) -> None:
        if self.saved:
            del self.saved[index % len(self.saved)]

    def any_steps(self, choose: Callable[[int], int]) -> None:
        """Forwards and backwards in any order, and all that is left at the end."""
        for _ in range(choose(120)):
            self.gpu.progress()
            what = choose(8)
            if what < 3:
                self.forward()
            elif what < 4:
                self.drop(choose(100))
            elif what < 5:
                self.backward(choose(100))
            else:
                self.backward(-1)
        while self.saved:
            self.gpu.progress()
            self.backward(-1)
        self.gpu.finish()
        self.scheduler.settle()
        self.gpu.finish()
