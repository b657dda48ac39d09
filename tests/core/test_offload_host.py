"""Pinned memory and streams, on a pretended device whose work may be as late as it likes."""

import random
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ckpt.core.offload import host
from lightning_ckpt.core.offload.host import HostTarget, PinnedPool
from lightning_ckpt.core.offload.schedule import Place, Scheduler

NUM_BYTES = 512
CPU = torch.device("cpu")


# --- the pool


def test_room_is_used_again() -> None:
    pool = PinnedPool(2**20, pin=False)
    for _ in range(5):
        rooms = [pool.take(n, CPU) for n in (1000, 513, 5000)]
        assert None not in rooms
        for room in rooms:
            pool.give_back(room)  # type: ignore[arg-type]
    assert pool.most_used == 1000 + 513 + 5000
    assert pool.pinned <= 2**20


def test_rooms_do_not_overlap() -> None:
    pool = PinnedPool(2**20, pin=False)
    rooms = [pool.take(700, CPU) for _ in range(20)]
    for number, room in enumerate(rooms):
        assert room is not None
        room.bytes.fill_(number)
    assert [int(room.bytes.max()) for room in rooms if room] == list(range(20))
    assert [int(room.bytes.min()) for room in rooms if room] == list(range(20))


@pytest.mark.parametrize("limit", [4096, 6000, 10**6])
def test_the_limit_is_never_passed(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_CHUNK_BYTES", 2048)
    pool = PinnedPool(limit, pin=False)
    rooms = [pool.take(1024, CPU) for _ in range(10)]
    assert pool.pinned <= limit
    assert sum(room is not None for room in rooms) == min(limit // 1024, 10)


def test_devices_have_no_chunk_in_common() -> None:
    pool = PinnedPool(2**30, pin=False)
    devices = [torch.device("cuda", index) for index in (0, 1, 0)]
    rooms = [pool.take(100, device) for device in devices]
    chunks = [room.chunk for room in rooms if room is not None]
    assert chunks[0] is chunks[2]
    assert chunks[0] is not chunks[1]


def test_chunks_are_powers_of_two_since_torch_would_round_them_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "_CHUNK_BYTES", 4096)
    pool = PinnedPool(10**6, pin=False)
    assert pool.take(100, CPU) is not None
    assert pool.take(9000, CPU) is not None
    assert [chunk.bytes.nbytes for chunk in pool._chunks] == [4096, 16384]
    assert pool.pinned == 4096 + 16384


def test_a_system_that_refuses_to_pin_leaves_tensors_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*args: Any) -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(host, "_Chunk", refuse)
    assert PinnedPool(2**40).take(100, CPU) is None


# --- a pretended device


class FakeEvent:
    def __init__(self, *args: Any, **values: Any) -> None:
        self.is_done = False

    def query(self) -> bool:
        return self.is_done

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

    def record_event(self, event: FakeEvent | None = None) -> FakeEvent:
        event = event or FakeEvent()
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
        patch.setattr(host.torch.accelerator, "current_stream", lambda device=None: gpu.current)
        patch.setattr(host.torch, "Stream", lambda device: FakeStream(gpu, device))
        patch.setattr(host.torch, "Event", FakeEvent)
        patch.setattr(host, "_copy", gpu.copy)
        patch.setattr(host, "_allocate", gpu.allocate)
        yield


class Training:
    """Blocks that save one tensor each."""

    def __init__(self, gpu: FakeGpu, prefetch: int, keep_last: int, num_rooms: int) -> None:
        self.gpu = gpu
        pool = PinnedPool(num_rooms * NUM_BYTES, pin=False)
        self.scheduler = Scheduler(HostTarget(pool), prefetch, keep_last)
        self.saved: list[tuple[Place, int]] = []
        self.value = 0

    def forward(self) -> None:
        value = self.value = self.value % 250 + 1
        tensor = self.gpu.allocate(NUM_BYTES)
        memory = self.gpu.raw(tensor)
        self.gpu.current.add(lambda: memory.fill_(value))
        self.saved.append((self.scheduler.save(self.scheduler.open_call(), tensor), value))
        self.scheduler.close_call()

    def backward(self, index: int) -> None:
        if self.saved:
            place, value = self.saved.pop(index % len(self.saved))
            storage = self.scheduler.use(place)
            memory = self.gpu.raw(host.as_bytes(storage))
            self.gpu.current.add(lambda: self.gpu.look(memory, value))

    def drop(self, index: int) -> None:
        if self.saved:
            del self.saved[index % len(self.saved)]


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(0, 2), st.sampled_from([3, 100]))
def test_copies_are_right_however_late_they_are(
    seed: int, prefetch: int, keep_last: int, num_rooms: int
) -> None:
    choose = random.Random(seed).randrange
    gpu = FakeGpu(choose)
    with on(gpu):
        training = Training(gpu, prefetch, keep_last, num_rooms)
        for _ in range(choose(120)):
            gpu.progress()
            what = choose(8)
            if what < 3:
                training.forward()
            elif what < 4:
                training.drop(choose(100))
            elif what < 5:
                training.backward(choose(100))
            else:
                training.backward(-1)
        while training.saved:
            gpu.progress()
            training.backward(-1)
        gpu.finish()
        training.scheduler.settle()
        gpu.finish()
    assert gpu.wrong == []


def test_time_that_the_device_waited_is_counted() -> None:
    gpu = FakeGpu(lambda below: 0)
    with on(gpu):
        target = HostTarget(PinnedPool(2**20, pin=False))
        scheduler = Scheduler(target, prefetch=0, keep_last=0)
        place = scheduler.save(scheduler.open_call(), torch.zeros(100))
        scheduler.settle()
        gpu.finish()
        assert target.seconds_waited() == pytest.approx(0.001)
        scheduler.use(place)
        gpu.finish()
        assert target.seconds_waited() == pytest.approx(0.002)
        assert target.asked_bytes == 400
