"""The file: what it does when things go wrong, and that nothing of it is left."""

import errno
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import MlpBlock, Stack
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.offload import disk
from lightning_ckpt.core.offload.config import OffloadConfig
from lightning_ckpt.core.offload.disk import DiskTarget, NamelessFile
from lightning_ckpt.core.offload.extents import Extents
from lightning_ckpt.core.offload.targets import Source
from lightning_ckpt.core.offload.worker import Job, Worker

BYTES = 2 * 8 * 4  # of a batch below


def config(directory: Path, **values: Any) -> OffloadConfig:
    return OffloadConfig(
        **{"target": "disk", "directory": str(directory), "min_bytes": 0, "keep_last": 0, **values}
    )


def forward(model: Stack) -> Tensor:
    return model(torch.ones(2, 8)).sum()


def forward_to_the_end(model: Stack, handle: Handle) -> Tensor:
    """With all copies out."""
    assert handle.offloader is not None
    loss = forward(model)
    handle.offloader.settle()
    return loss


# --- a failure ends the step


def no_space(*args: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def assert_named(error: BaseException, directory: Path, number: int | None) -> None:
    assert isinstance(error, OSError)
    if number is not None:
        assert os.strerror(number) in str(error)
    assert str(directory) in str(error)
    assert f"{BYTES} bytes" in str(error)


def test_a_full_disk_ends_the_step_in_the_training_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Stack(MlpBlock, 4)
    with apply_partial_checkpoint(model, offload=config(tmp_path)) as handle:
        with monkeypatch.context() as broken:
            broken.setattr(os, "pwrite", no_space)
            with pytest.raises(OSError, match="could not write") as caught:
                forward_to_the_end(model, handle)
            assert_named(caught.value, tmp_path, errno.ENOSPC)
        loss = forward(model)  # there is room again
        loss.backward()


@pytest.mark.parametrize(
    ("read", "number"), [(lambda *args: 0, None), (no_space, errno.ENOSPC)], ids=["short", "error"]
)
def test_a_failed_read_ends_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Callable[..., int], number: int | None
) -> None:
    model = Stack(MlpBlock, 4)
    with apply_partial_checkpoint(model, offload=config(tmp_path)) as handle:
        loss = forward_to_the_end(model, handle)
        with monkeypatch.context() as broken:
            broken.setattr(os, "preadv", read)
            with pytest.raises(OSError, match="could not read") as caught:
                loss.backward()
        assert_named(caught.value, tmp_path, number)
        del loss
        forward(model).backward()


def test_a_directory_that_is_gone_before_the_first_step(tmp_path: Path) -> None:
    directory = tmp_path / "gone"
    directory.mkdir()
    model = Stack(MlpBlock, 4)
    with apply_partial_checkpoint(model, offload=config(directory)) as handle:
        directory.rmdir()
        with pytest.raises(OSError, match="could not write") as caught:
            forward_to_the_end(model, handle)
        assert_named(caught.value, directory, errno.ENOENT)


def test_a_directory_that_is_removed_later_is_not_missed(tmp_path: Path) -> None:
    """The file has no name in it."""
    directory = tmp_path / "gone"
    directory.mkdir()
    model = Stack(MlpBlock, 4)
    with apply_partial_checkpoint(model, offload=config(directory)):
        forward(model).backward()
        directory.rmdir()
        forward(model).backward()


FULL = """
import resource, signal, sys, torch
from torch import nn
from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.offload import OffloadConfig
resource.setrlimit(resource.RLIMIT_FSIZE, (3 * 4096, 3 * 4096))  # no file may be larger
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(8)))
config = OffloadConfig("disk", directory=sys.argv[1], min_bytes=0, keep_last=0)
with apply_partial_checkpoint(model, offload=config, layers="*", ) as handle:
    model(torch.ones(16, 64)).sum().backward()
    handle.offloader.settle()
"""


def test_a_file_that_may_not_grow(tmp_path: Path) -> None:
    script = FULL.replace('layers="*"', "layers=[str(i) for i in range(8)]")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 1
    assert "OSError" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert os.strerror(errno.EFBIG) in last
    assert "4096 bytes" in last
    assert str(tmp_path) in last
    assert list(tmp_path.iterdir()) == []


# --- nothing is left


TRAIN = """
import signal, sys, tempfile, torch
from torch import nn
from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.offload import OffloadConfig
model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.ReLU()) for _ in range(4)))
config = OffloadConfig("disk", directory=sys.argv[1], min_bytes=0, keep_last=0)
names = [str(i) for i in range(4)]
if sys.argv[2] == "interrupt":
    # What a shell started in the background ignores it, and so do its children.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Blocks are kept: torch's own checkpoint drops a Ctrl-C now and then, by a weak reference's
    # callback that is written in Python.
    tempfile.tempdir = sys.argv[1]
    plan = {"blocks": [{"name": name, "action": "keep", "offload": "disk"} for name in names]}
    handle = apply_partial_checkpoint(model, plan=plan)
else:
    handle = apply_partial_checkpoint(model, offload=config, layers=names)
for index in range(10**9):
    loss = model(torch.ones(256, 256)).sum()
    if index == 3:
        handle.offloader.settle()
        print("running", handle.offloader.report().taken_bytes, flush=True)
        if sys.argv[2] == "exit":
            break
        if sys.argv[2] == "exception":
            raise ValueError("in between")
    loss.backward()
"""


@pytest.mark.parametrize("end", ["exit", "exception", "kill", "term", "interrupt"])
def test_nothing_is_left_behind(tmp_path: Path, end: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TRAIN, str(tmp_path), end],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _end_it(process, tmp_path, end)
    finally:
        process.kill()  # a test that failed must not leave it running


def _end_it(process: subprocess.Popen[str], tmp_path: Path, end: str) -> None:
    assert process.stdout is not None
    running = process.stdout.readline()
    assert running.startswith("running")
    assert int(running.split()[1]) >= (1 if end == "interrupt" else 4) * 256 * 256 * 4
    number = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "interrupt": signal.SIGINT}.get(end)
    if number is not None:
        assert list(tmp_path.iterdir()) == [], "no name even while it runs"
        assert _open_file(process.pid, tmp_path), "the file is not in its directory"
        process.send_signal(number)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == {None: end == "exception"}.get(number, -(number or 0)), errors
    assert list(tmp_path.iterdir()) == []


def _open_file(process: int, directory: Path) -> list[str]:
    files = [
        os.readlink(path) for path in Path(f"/proc/{process}/fd").iterdir() if path.is_symlink()
    ]
    return [file for file in files if file.startswith(str(directory)) and "(deleted)" in file]


def test_the_file_is_made_where_nobody_else_may_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    make = disk.tempfile.TemporaryFile

    def watching(*args: Any, **values: Any) -> Any:
        seen.append(stat.S_IMODE(os.stat(values["dir"]).st_mode))
        return make(*args, **values)

    monkeypatch.setattr(disk.tempfile, "TemporaryFile", watching)
    file = NamelessFile(str(tmp_path))
    file.write(memoryview(b"x"), 0)
    assert seen == [0o700]
    assert list(tmp_path.iterdir()) == []


def test_threads_that_come_first_together_have_one_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = disk._open_nameless

    def slow(directory: str) -> int:
        time.sleep(0.05)
        made.append(make(directory))
        return made[-1]

    monkeypatch.setattr(disk, "_open_nameless", slow)
    file = NamelessFile(str(tmp_path))
    threads = [threading.Thread(target=file.write, args=(memoryview(b"x"), n)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(made) == 1
    back = bytearray(4)
    file.read(memoryview(back), 0)
    assert back == b"xxxx"
    file.close()


def test_file_and_thread_end_with_the_handle(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    model = Stack(MlpBlock, 4)
    handle = apply_partial_checkpoint(model, offload=config(tmp_path))
    forward(model).backward()
    assert _open_file(os.getpid(), tmp_path)
    (thread,) = set(threading.enumerate()) - before
    handle.remove()
    del handle
    gc.collect()
    thread.join(10)
    assert not thread.is_alive()
    assert not _open_file(os.getpid(), tmp_path)


# --- jobs


@pytest.fixture
def worker() -> Worker:
    return Worker(lambda: None)


def test_a_job_is_done_once(worker: Worker) -> None:
    done: list[int] = []
    jobs = [Job(lambda index=index: done.append(index)) for index in range(200)]  # type: ignore[misc]
    for job in jobs:
        worker.add(job)
    for job in reversed(jobs):
        job.wait()
    assert sorted(done) == list(range(200))


def test_a_job_that_is_waited_for_is_not_behind_others(worker: Worker) -> None:
    gate = threading.Event()
    worker.add(Job(lambda: gate.wait(30) and None))
    done: list[str] = []
    job = Job(lambda: done.append(threading.current_thread().name))
    worker.add(job)
    job.wait()
    gate.set()
    assert done == [threading.current_thread().name]


def test_an_error_of_a_job_is_raised_where_it_is_waited_for(worker: Worker) -> None:
    job = Job(no_space)
    worker.add(job)
    with pytest.raises(OSError, match="No space"):
        job.wait()


def test_the_thread_holds_nothing_of_a_copy_that_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "pwrite", no_space)
    parcel = DiskTarget(str(tmp_path)).send(Source(torch.zeros(1024)))
    with pytest.raises(OSError, match="could not write"):
        parcel.finish()
    gone = weakref.ref(parcel)
    del parcel
    end = time.monotonic() + 10
    while gone() is not None and time.monotonic() < end:
        gc.collect()  # the error and its frames
        time.sleep(0.01)
    assert gone() is None


def test_a_job_that_is_interrupted_is_done_by_whoever_comes_next(worker: Worker) -> None:
    done: list[int] = []

    def action() -> None:
        done.append(len(done))
        if len(done) == 1:
            raise KeyboardInterrupt

    job = Job(action)
    with pytest.raises(KeyboardInterrupt):
        job.wait()
    assert not job.has_ended()
    job.wait()
    job.wait()
    assert done == [0, 1]
    assert job.has_ended()


def test_who_waits_for_a_thread_can_be_interrupted(worker: Worker) -> None:
    gate, begun = threading.Event(), threading.Event()
    job = Job(lambda: begun.set() or (gate.wait(30) and None))
    worker.add(job)
    assert begun.wait(30)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            job.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not job.has_ended()
    gate.set()
    job.wait()


# --- stretches


def test_stretches_are_used_again(tmp_path: Path) -> None:
    target = DiskTarget(str(tmp_path))
    for step in range(20):
        parcels = [target.send(Source(torch.full((1024 * n,), float(n)))) for n in (3, 1, 2)]
        for number, parcel in zip((3, 1, 2), parcels, strict=True):
            back = parcel.fetch().wait()
            values = torch.empty(0).set_(back, 0, (1024 * number,), (1,))
            assert (values == number).all(), step
        del back
        for _ in range(3):
            del parcels[step % len(parcels)]
        del parcel
    assert target.asked_bytes == 6 * 4096
    assert target.taken_bytes == 6 * 4096


def test_a_stretch_is_not_used_again_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), threading.Event()
    write = os.pwrite

    def slow(*args: Any) -> int:
        begun.set()
        assert gate.wait(30)
        return write(*args)

    monkeypatch.setattr(os, "pwrite", slow)
    target = DiskTarget(str(tmp_path))
    first = target.send(Source(torch.full((1024,), 1.0)))
    assert begun.wait(30)
    del first  # its graph is dropped
    second = target.send(Source(torch.full((1024,), 2.0)))
    gate.set()
    values = torch.empty(0).set_(second.fetch().wait(), 0, (1024,), (1,))
    assert (values == 2).all()
    assert target.taken_bytes == 2 * 4096


def test_writes_and_reads_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(disk.time, "perf_counter", lambda: now[0])
    write, read = os.pwrite, os.preadv

    def slow(call: Callable[..., int], seconds: float) -> Callable[..., int]:
        def timed(*args: Any) -> int:
            now[0] += seconds
            return call(*args)

        return timed

    monkeypatch.setattr(os, "pwrite", slow(write, 0.5))
    monkeypatch.setattr(os, "preadv", slow(read, 0.25))
    target = DiskTarget(str(tmp_path))
    for _ in range(3):
        parcel = target.send(Source(torch.zeros(1024)))
        parcel.fetch().wait()
    assert target.moved() == ((3 * 4096, 1.5), (3 * 4096, 0.75))
    assert target.moved()[0].bytes_per_second == 8192


def test_times_of_copies_do_not_grow(tmp_path: Path) -> None:
    """One sums them up where a copy begins."""
    target = DiskTarget(str(tmp_path))
    for _ in range(20):
        target.send(Source(torch.zeros(1024))).fetch().wait()
    assert len(target.file.written._new) <= 1
    assert len(target.file.read_back._new) <= 1


def test_a_large_write_goes_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Linux takes less than 2 GiB at a time; here less than 1000 bytes."""
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda fd, view, at: write(fd, view[:999], at))
    monkeypatch.setattr(os, "preadv", lambda fd, views, at: read(fd, [views[0][:777]], at))
    file = NamelessFile(str(tmp_path))
    data, back = os.urandom(5000), bytearray(5000)
    file.write(memoryview(data), 100)
    file.read(memoryview(back), 100)
    assert back == data


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 50)), max_size=80), st.integers(1, 9))
def test_stretches_never_overlap_and_none_is_lost(steps: list[tuple[bool, int]], unit: int) -> None:
    extents = Extents(unit=unit)
    taken: list[tuple[int, int]] = []
    for is_take, number in steps:
        if is_take:
            stretch = extents.take(number)
            assert stretch is not None
            assert number <= stretch[1] < number + unit
            taken.append(stretch)
        elif taken:
            extents.give_back(*taken.pop(number % len(taken)))
        places = [place for start, length in taken for place in range(start, start + length)]
        assert len(set(places)) == len(places)
        assert sum(length for _, length in extents._free) == extents.end - len(places)
    for stretch in taken:
        extents.give_back(*stretch)
    assert (extents.end, extents._free) == (0, [])


def test_the_smallest_stretch_that_fits_is_taken_and_its_rest_stays_free() -> None:
    extents = Extents(unit=10)
    stretches = [extents.take(number) for number in (40, 10, 20, 10, 30, 10)]
    for stretch in stretches[::2]:
        assert stretch is not None
        extents.give_back(*stretch)
    assert extents.take(20) == (50, 20)
    assert extents.take(15) == (80, 20)
    assert extents.take(10) == (100, 10)
    assert extents.take(40) == (0, 40)
    assert extents.end == 120


def test_stretches_have_a_limit() -> None:
    extents = Extents(limit=100, unit=10)
    first = extents.take(95)
    assert first == (0, 100)
    assert extents.take(1) is None
    extents.give_back(*first)
    assert extents.take(1) == (0, 10)
