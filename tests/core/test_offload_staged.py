"""A file for tensors of a device, by way of the host, on a pretended device and with its thread as
late as it likes."""

import errno
import gc
import os
import random
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from fake_device import NUM_BYTES, Copy, FakeGpu, Training, on
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lightning_ckpt.core import offload
from lightning_ckpt.core.offload import OffloadConfig, make_offloader, staged
from lightning_ckpt.core.offload.disk import DiskTarget
from lightning_ckpt.core.offload.pool import PinnedPool
from lightning_ckpt.core.offload.staged import StagedTarget
from lightning_ckpt.core.offload.targets import Source
from lightning_ckpt.core.offload.worker import Job


class LateWorker:
    """Does a job when it is told to."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def add(self, job: Job) -> None:
        self.jobs.append(job)

    def progress(self, number: int) -> None:
        for _ in range(min(number, len(self.jobs))):
            self.jobs.pop(0).run()

    def is_alive(self) -> bool:
        return True


class Machine(FakeGpu):
    """A device, a thread, a file, and plain memory that is other work's at once when it is let go
    of."""

    def __init__(self, directory: str, num_rooms: int, choose: Callable[[int], int]) -> None:
        super().__init__(choose)
        self.worker = LateWorker()
        self.pool = PinnedPool(num_rooms * NUM_BYTES)
        disk = DiskTarget(directory)
        disk.worker = self.worker  # type: ignore[assignment]
        self.target = StagedTarget(disk, self.pool)
        self.plain: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self.most_plain = 0

    def progress(self) -> None:
        super().progress()
        self.worker.progress(self.choose(3))

    def plain_memory(self, num_bytes: int) -> Tensor:
        memory = bytearray(num_bytes)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.known[tensor.data_ptr()] = memory
        other = torch.frombuffer(memory, dtype=torch.uint8)
        weakref.finalize(tensor.untyped_storage(), other.fill_, 254)
        self.plain.add(tensor.untyped_storage())
        self.most_plain = max(self.most_plain, len(self.plain))
        return tensor

    def buffers_in_use(self) -> int:
        """How many rooms were taken and not given back."""
        self.finish()
        self.worker.progress(10**6)
        assert self.target._stage.take(1, self.device)  # looks through what was returned
        return self.pool._used // NUM_BYTES


@contextmanager
def machine(
    num_rooms: int = 100, choose: Callable[[int], int] = lambda below: 0
) -> Iterator[Machine]:
    with TemporaryDirectory() as directory:
        made = Machine(directory, num_rooms, choose)
        with on(made), pytest.MonkeyPatch.context() as patch:
            patch.setattr(staged, "plain_memory", made.plain_memory)
            yield made


@settings(max_examples=400, deadline=None)
@given(st.integers(0, 2**32), st.integers(0, 2), st.integers(0, 2), st.sampled_from([0, 1, 3, 100]))
def test_copies_are_right_however_late_they_are(
    seed: int, prefetch: int, keep_last: int, num_rooms: int
) -> None:
    choose = random.Random(seed).randrange
    with machine(num_rooms, choose) as made:
        Training(made, made.target, prefetch, keep_last).any_steps(choose)
        assert made.wrong == []
        assert made.pool.pinned <= num_rooms * NUM_BYTES
        assert made.buffers_in_use() == 0


def test_a_source_is_let_go_when_the_device_is_done_with_it_and_not_when_it_is_written() -> None:
    with machine() as made:
        training = Training(made, made.target, 0, 0)
        training.forward()
        source = training.saved[0][0].slot.source
        training.scheduler.look()
        assert source.tensor is not None, "its copy did not begin"
        made.finish()
        training.scheduler.look()
        assert source.tensor is None
        (write,) = made.worker.jobs
        assert not write.has_ended()


def test_copies_out_run_beside_the_compute_and_copies_back_in_it() -> None:
    with machine() as made:
        training = Training(made, made.target, 0, 0)
        training.leave()
        training.backward(-1)
        home, beside = made.streams
        assert made.copies == [Copy(beside, True, True), Copy(home, False, True)]


@pytest.mark.parametrize("num_rooms", [0, 1, 2, 5])
def test_memory_between_device_and_file_has_a_bound(num_rooms: int) -> None:
    """Without pinned memory one buffer takes turns."""
    with machine(num_rooms) as made:
        training = Training(made, made.target, 0, 0)
        for _ in range(20):
            training.forward()
        assert made.pool.most_used == num_rooms * NUM_BYTES
        assert made.most_plain == (not num_rooms)
        assert made.target.staged_bytes() == (num_rooms * NUM_BYTES, made.pool.pinned)
        for _ in range(20):
            training.backward(-1)
        assert made.most_plain == (not num_rooms)
        made.finish()
        assert made.wrong == []


def test_a_fetched_call_takes_memory_of_the_device_when_it_is_asked_for() -> None:
    with machine() as made:
        training = Training(made, made.target, 3, 0)
        num_free = training.leave(4)
        training.backward(-1)
        assert training.scheduler.counts.num_ahead == 3
        assert len(made.free) == num_free, "one was taken, and let go of after its use"


# --- what goes wrong


def no_space(*args: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_writes_that_fail_together_are_one_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine() as made:
        training = Training(made, made.target, 1, 0)
        for _ in range(3):
            training.forward()
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", no_space)
            made.worker.progress(1)
            with pytest.raises(OSError, match=f"could not write {NUM_BYTES} bytes"):
                training.forward()
            assert all(job.has_ended() for job in made.worker.jobs)
        graph = [training.saved.pop() for _ in range(3)]  # somebody still holds it
        for _ in range(3):
            training.forward()
        for _ in range(3):
            training.backward(-1)
        made.finish()
        assert made.wrong == []
        del training, graph
        made.worker.progress(10**6)
        gc.collect()  # errors and their frames
        assert made.buffers_in_use() == 0


def test_a_failed_write_is_raised_where_its_bytes_are_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with machine() as made:
        training = Training(made, made.target, 1, 0)
        training.leave()
        monkeypatch.setattr(os, "pwrite", no_space)
        with pytest.raises(OSError, match="could not write"):
            training.backward(-1)


def test_who_settles_waits_for_the_file_and_hears_of_a_failed_write(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with machine() as made:
        training = Training(made, made.target, 1, 0)
        training.forward()
        training.scheduler.settle()
        (write,) = made.worker.jobs
        assert write.has_ended()
        assert made.target.moved()[0].num_bytes == NUM_BYTES
        training.forward()
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", no_space)
            with pytest.raises(OSError, match="could not write"):
                training.scheduler.settle()
        training.scheduler.settle()  # one error, once


def test_a_failed_write_that_nobody_needs_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with machine() as made:
        training = Training(made, made.target, 1, 0)
        training.leave()
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", no_space)
            made.worker.progress(1)
        training.saved.clear()
        training.forward()


def test_a_failed_read_is_an_error_and_gives_its_buffer_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with machine() as made:
        training = Training(made, made.target, 0, 0)
        training.leave()
        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", no_space)
            with pytest.raises(OSError, match="could not read"):
                training.backward(-1)
        del training
        made.worker.progress(10**6)
        gc.collect()  # errors and their frames
        assert made.buffers_in_use() == 0


@pytest.mark.parametrize("call", ["pwrite", "preadv"])
def test_a_buffer_is_not_used_again_while_the_thread_is_at_it(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its graph is dropped meanwhile."""
    gate, begun = threading.Event(), threading.Event()
    system = getattr(os, call)

    def slow(*args: Any) -> int:
        begun.set()
        assert gate.wait(30)
        return system(*args)  # type: ignore[no-any-return]

    monkeypatch.setattr(os, call, slow)
    with machine() as made:
        target = StagedTarget(DiskTarget(str(tmp_path)), made.pool)  # with a thread
        parcel = target.send(Source(made.allocate(NUM_BYTES)))
        made.finish()
        arrival = parcel.fetch() if call == "preadv" else None
        assert begun.wait(30)
        del parcel, arrival
        rooms = [target._stage.take(NUM_BYTES, made.device) for _ in range(3)]
        assert made.pool._used == 4 * NUM_BYTES, "the one that is written from, and these"
        gate.set()
        assert rooms


def test_nothing_grows() -> None:
    with machine(num_rooms=4, choose=random.Random(0).randrange) as made:
        training = Training(made, made.target, 1, 1)
        for _ in range(1000):
            for _ in range(3):
                training.forward()
            made.progress()
            training.drop(0)
            training.backward(-1)
            training.backward(-1)
            made.finish()
            made.worker.progress(100)
        stage = made.target._stage
        assert len(stage._writes) <= 3
        assert len(stage._copies) <= 6
        assert made.target.taken_bytes <= 8 * 4096
        assert made.wrong == []


# --- which tensors, and how much memory


def test_tensors_of_the_host_need_no_stage(tmp_path: Path) -> None:
    pool = PinnedPool(2**20, pin=False)
    target = StagedTarget(DiskTarget(str(tmp_path)), pool)
    parcel = target.send(Source(torch.full((128,), 3.0)))
    values = torch.empty(0).set_(parcel.fetch().wait(), 0, (128,), (1,))
    assert (values == 3).all()
    assert pool.most_used == 0
    assert target.asked_bytes == NUM_BYTES


@pytest.mark.parametrize(
    ("said", "free", "expected"),
    [(None, 2**50, 2 * 2**30), (None, 2**30, 2**30), (2**33, 2**50, 2**33)],
)
def test_the_stage_is_small_unless_the_user_says_more(
    said: int | None, free: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(offload, "host_budget", lambda number: number or free)
    made = make_offloader(OffloadConfig("disk", max_host_bytes=said), nn.Linear(1, 1))
    assert made is not None
    assert isinstance(made._target, StagedTarget)
    assert made._target._stage.pool._max_bytes == expected


def test_without_a_device_there_is_no_stage() -> None:
    made = make_offloader(OffloadConfig("disk"), nn.Linear(1, 1))
    assert made is not None
    assert isinstance(made._target, DiskTarget)
