"""Pinned memory and streams, on a pretended device whose work may be as late as it likes."""

import random
from typing import Any

import pytest
import torch
from fake_device import NUM_BYTES, Copy, FakeGpu, FakeStream, Training, on
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_ckpt.core.offload import host
from lightning_ckpt.core.offload import pool as pools
from lightning_ckpt.core.offload.host import HostTarget
from lightning_ckpt.core.offload.pool import PinnedPool
from lightning_ckpt.core.offload.schedule import Scheduler
from lightning_ckpt.core.offload.targets import as_bytes

CPU = torch.device("cpu")


# --- the pool


def test_room_is_used_again() -> None:
    pool = PinnedPool(2**20, pin=False)
    for _ in range(5):
        rooms = [pool.take(n, CPU) for n in (1000, 513, 5000)]
        assert None not in rooms
        del rooms
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
    monkeypatch.setattr(pools, "_CHUNK_BYTES", 2048)
    pool = PinnedPool(limit, pin=False)
    rooms = [pool.take(1024, CPU) for _ in range(10)]
    assert pool.pinned <= limit
    assert sum(room is not None for room in rooms) == min(limit // 1024, 10)


def test_devices_have_no_chunk_in_common() -> None:
    pool = PinnedPool(2**30, pin=False)
    devices = [torch.device("cuda", index) for index in (0, 1, 0)]
    rooms = [pool.take(100, device) for device in devices]
    chunks = [room.bytes.untyped_storage().data_ptr() for room in rooms if room is not None]
    assert chunks[0] == chunks[2] != chunks[1]


def test_chunks_are_powers_of_two_since_torch_would_round_them_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pools, "_CHUNK_BYTES", 4096)
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

    monkeypatch.setattr(pools, "_Chunk", refuse)
    assert PinnedPool(2**40).take(100, CPU) is None


# --- a pretended device


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(0, 2), st.sampled_from([3, 100]))
def test_copies_are_right_however_late_they_are(
    seed: int, prefetch: int, keep_last: int, num_rooms: int
) -> None:
    choose = random.Random(seed).randrange
    gpu = FakeGpu(choose)
    with on(gpu):
        pool = PinnedPool(num_rooms * NUM_BYTES)
        Training(gpu, HostTarget(pool), prefetch, keep_last).any_steps(choose)
    assert gpu.wrong == []


def test_time_that_the_device_waited_is_counted() -> None:
    gpu = FakeGpu(lambda below: 0)
    with on(gpu):
        target = HostTarget(PinnedPool(2**20))
        scheduler = Scheduler(target, prefetch=0, keep_last=0)
        place = scheduler.save(scheduler.open_call(), gpu.allocate(400))
        scheduler.settle()
        gpu.finish()
        assert target.seconds_waited() == pytest.approx(0.001)
        scheduler.use(place)
        gpu.finish()
        assert target.seconds_waited() == pytest.approx(0.002)
        assert target.asked_bytes == 400


def test_the_stream_that_made_a_source_waits_for_its_copy_whichever_is_current() -> None:
    """Its memory goes to work that comes later on that stream."""
    gpu = FakeGpu(lambda below: 0)
    with on(gpu):
        training = Training(gpu, HostTarget(PinnedPool(2**20)), 0, 0)
        training.forward()
        with FakeStream(gpu):
            training.scheduler.settle()
        training.backward(-1)
        gpu.finish()
    assert gpu.wrong == []


def test_what_was_fetched_and_dropped_stays_until_its_copy_has_ended() -> None:
    """No code runs when it is dropped: it would swallow a Ctrl-C."""
    gpu = FakeGpu(lambda below: 0)
    with on(gpu):
        training = Training(gpu, HostTarget(PinnedPool(2**20)), 1, 0)
        num_free = training.leave(2)
        training.backward(-1)
        assert training.scheduler.counts.num_ahead == 1
        training.drop(0)
        training.scheduler.look()
        assert len(gpu.free) == num_free - 1, "a copy may be writing to it"
        gpu.finish()
        training.scheduler.look()
        assert len(gpu.free) == num_free
    assert gpu.wrong == []


def test_what_was_fetched_for_nothing_is_free_for_work_that_comes_after_its_copy() -> None:
    """The stream that it is of waits; the host does not."""
    gpu = FakeGpu(lambda below: 0)
    with on(gpu):
        training = Training(gpu, HostTarget(PinnedPool(2**20)), 1, 0)
        training.leave(3)
        num_free = fetch_the_last_ahead(training)
        assert len(gpu.free) == num_free - 1
        training.backward(0)
        assert len(gpu.free) == num_free
        while gpu.current.step():  # as far as it comes by itself
            pass
        gpu.finish()
    assert gpu.wrong == []


def fetch_the_last_ahead(training: Training) -> int:
    """What the last call saved comes back, and nothing else: one that saved nothing is asked for.
    Says how much memory was free before."""
    last = training.scheduler.open_call()
    training.gpu.finish()
    training.scheduler.look()
    num_free = len(training.gpu.free)
    training.scheduler.touch(last)
    assert training.scheduler.counts.num_ahead == 1
    return num_free


def test_what_is_used_on_another_stream_than_it_was_fetched_on() -> None:
    """The allocator is told of that stream, and both wait for the copy: here the bytes are asked
    for on the one, and then on the other."""
    gpu = FakeGpu(lambda below: 0)
    with on(gpu):
        training = Training(gpu, HostTarget(PinnedPool(2**20)), 1, 0)
        tensor, call = gpu.allocate(NUM_BYTES), training.scheduler.open_call()
        tensor.fill_(7)
        places = [training.scheduler.save(call, tensor) for _ in range(2)]
        del tensor
        fetch_the_last_ahead(training)
        other, home = FakeStream(gpu), gpu.current
        storages = []
        for stream, place in zip((other, home), places, strict=True):
            with stream:
                storages.append(training.scheduler.use(place))
                memory = gpu.raw(as_bytes(storages[-1]))
                stream.add(lambda memory=memory: gpu.look(memory, 7))
        assert list(gpu.users.values()) == [[other]]
        for stream in (other, home):
            while stream.step():
                pass
        gpu.finish()
    assert gpu.wrong == []


def test_who_settles_waits_for_the_device() -> None:
    gpu = FakeGpu(lambda below: 0)
    with on(gpu):
        target = HostTarget(PinnedPool(2**20))
        scheduler = Scheduler(target, prefetch=0, keep_last=0)
        place = scheduler.save(scheduler.open_call(), gpu.allocate(400))
        scheduler.settle()
        assert place.slot.source.tensor is None
        assert target.moved()[0].num_bytes == 400


def test_copies_that_have_ended_are_timed() -> None:
    gpu = FakeGpu(lambda below: 0)
    with on(gpu):
        target = HostTarget(PinnedPool(2**20))
        scheduler = Scheduler(target, prefetch=0, keep_last=0)
        places = [scheduler.save(scheduler.open_call(), gpu.allocate(400)) for _ in range(2)]
        assert target.moved() == ((0, 0.0), (0, 0.0)), "the device did nothing so far"
        gpu.finish()
        assert target.moved() == ((800, pytest.approx(0.002)), (0, 0.0))
        scheduler.use(places[1])
        gpu.finish()
        out, back = target.moved()
        assert out.bytes_per_second == pytest.approx(400_000)
        assert back == (400, pytest.approx(0.001))


def test_copies_run_on_a_stream_of_their_own_and_let_nobody_wait() -> None:
    """Between the device and pinned memory: of other memory the host would wait."""
    gpu = FakeGpu(lambda below: 0)
    with on(gpu):
        training = Training(gpu, HostTarget(PinnedPool(2**20)), 1, 0)
        training.forward()
        training.forward()
        assert gpu.now == 0, "the host has waited for the device"
        gpu.finish()
        training.scheduler.look()
        begin = gpu.now
        training.backward(-1)
        assert gpu.now == begin, "the host has waited for the device"
        gpu.finish()
    home, beside = gpu.streams
    assert gpu.current is home
    assert gpu.copies == [Copy(beside, is_out, True) for is_out in (True, True, False, False)]


def test_a_copy_out_that_has_ended_costs_the_compute_nothing() -> None:
    gpu = FakeGpu(lambda below: 0)
    with on(gpu):
        target = HostTarget(PinnedPool(2**20))
        scheduler = Scheduler(target, prefetch=0, keep_last=0)
        source = gpu.allocate(NUM_BYTES)
        place = scheduler.save(scheduler.open_call(), source)
        gpu.finish()
        scheduler.look()
        assert place.slot.source.tensor is None
        assert gpu.current.query(), "it waits for something"
        assert target.seconds_waited() == 0


def test_what_is_known_of_copies_and_waits_does_not_grow() -> None:
    """Nobody asks for it in most trainings."""
    gpu = FakeGpu(lambda below: 0)
    with on(gpu):
        target = HostTarget(PinnedPool(2**20))
        training = Training(gpu, target, 0, 0)
        for _ in range(100):
            training.leave()
            training.backward(-1)
            gpu.finish()
    known = target._streams
    for growing in (known._waits, known._copies, known.out._new, known.back._new):
        assert len(growing) <= 1
    assert known.moved() == ((100 * NUM_BYTES, pytest.approx(0.1)),) * 2


def test_another_thread_may_use_what_has_arrived_while_one_looks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two schedulers, say, of a thread each, have what is arriving in common."""
    arriving: dict[int, Any] = {}

    class Stream:
        def query(self) -> bool:
            arriving.clear()
            arriving[3] = self, None
            return True

    arriving.update({1: (Stream(), None), 2: (Stream(), None)})
    monkeypatch.setattr(host, "_arriving", arriving)
    HostTarget(PinnedPool(2**20)).look()
    assert list(arriving) == [3]
