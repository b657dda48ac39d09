"""A pretended device whose work may be as late as it likes, and a training on it."""

import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_ckpt.core.offload import streams
from lightning_ckpt.core.offload.schedule import Scheduler
from lightning_ckpt.core.offload.slots import Place
from lightning_ckpt.core.offload.targets import Target, as_bytes

NUM_BYTES = 512


class FakeEvent:
    def __init__(self, *args: Any, **values: Any) -> None:
        self.is_done = False
        self.gpu: FakeGpu | None = None  # once it is recorded

    def query(self) -> bool:
        return self.is_done

    def synchronize(self) -> None:
        assert self.gpu is not None
        while not self.is_done:
            assert sum(stream.step() for stream in self.gpu.streams), "it would wait for ever"

    def elapsed_time(self, other: "FakeEvent") -> float:
        return 1.0


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
        self.add(lambda: setattr(event, "is_done", True))
        return event

    def wait_event(self, event: FakeEvent) -> None:
        self.add(lambda: None, after=event)

    def __enter__(self) -> None:
        self.gpu.stack.append(self)

    def __exit__(self, *args: Any) -> None:
        self.gpu.stack.pop()


class FakeGpu:
    """Streams, and memory that goes to other work of the first stream, and is given out again, as
    soon as the program lets go of it."""

    def __init__(self, choose: Callable[[int], int]) -> None:
        self.choose = choose
        self.fast = choose(2)
        self.streams: list[FakeStream] = []
        self.stack = [FakeStream(self)]
        self.free: list[bytearray] = []
        self.known: dict[int, bytearray] = {}  # by address: they live as long as this does
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

    def allocate(self, num_bytes: int, device: Any = None) -> Tensor:
        memory = self.free.pop() if self.free else bytearray(num_bytes)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.known[tensor.data_ptr()] = memory
        weakref.finalize(tensor.untyped_storage(), self.reuse, memory)
        return tensor

    def reuse(self, memory: bytearray) -> None:
        other = torch.frombuffer(memory, dtype=torch.uint8)
        self.streams[0].add(lambda: other.fill_(255))
        self.streams[0].add(lambda: self.look(other, 255))
        self.free.append(memory)

    def raw(self, tensor: Tensor) -> Tensor:
        """The same memory: work that is waiting keeps no tensor alive."""
        memory = self.known.get(tensor.data_ptr())
        return tensor if memory is None else torch.frombuffer(memory, dtype=torch.uint8)

    def copy(self, source: Tensor, into: Tensor) -> None:
        source, into = self.raw(source), self.raw(into)
        self.current.add(lambda: into.copy_(source))

    def look(self, tensor: Tensor, value: int) -> None:
        if not (tensor == value).all():
            self.wrong.append(f"{int(tensor[0])} in place of {value}")


@contextmanager
def on(gpu: FakeGpu) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.accelerator, "current_stream", lambda device=None: gpu.current)
        patch.setattr(torch, "Stream", lambda device: FakeStream(gpu, device))
        patch.setattr(torch, "Event", FakeEvent)
        patch.setattr(streams, "start_copy", gpu.copy)
        patch.setattr(streams, "allocate", gpu.allocate)
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
