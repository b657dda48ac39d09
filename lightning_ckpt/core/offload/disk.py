"""Tensors wait in a file that has no name.

The file is unlinked before its first byte is written, so the system takes it back however the
process ends. Stretches of it are used again. One thread of the standard library writes and reads;
whoever needs a result that the thread has not begun with does the work itself, so nobody waits for
a thread that hangs behind others' work, or that a fork has left behind.
"""

import ctypes
import os
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ckpt.core.offload.extents import Extents
from lightning_ckpt.core.offload.targets import Arrival, Parcel, Source, Target

_LOOK_SECONDS = 1.0  # how often someone who waits looks whether the thread is still there


class Job:
    """Something to do, once, by whoever comes first."""

    def __init__(self, action: Callable[[], None]) -> None:
        self._action: Callable[[], None] | None = action
        self._ticket = [True]  # taken by `pop`, which no two threads can do
        self._ended = threading.Event()
        self.error: BaseException | None = None

    def _claim(self) -> bool:
        try:
            return self._ticket.pop()
        except IndexError:
            return False

    def run(self) -> None:
        """Do it, unless somebody does or did."""
        if not self._claim():
            return
        assert self._action is not None
        try:
            self._action()
        except BaseException as error:
            self.error = error
        finally:
            self._action = None  # and what it holds: a source, or a buffer
            self._ended.set()

    def cancel(self) -> bool:
        """Do not do it, unless somebody began; whether that was in time."""
        is_in_time = self._claim()
        if is_in_time:
            self._action = None
            self._ended.set()
        return is_in_time

    def has_ended(self) -> bool:
        return self._ended.is_set()

    def wait(self, worker: "Worker") -> None:
        """Do it here, or wait for whoever does, and raise what went wrong."""
        self.run()
        while not self._ended.wait(_LOOK_SECONDS):
            if not worker.is_alive():
                raise RuntimeError("the thread that copies offloaded tensors has ended in a copy")
        if self.error is not None:
            raise self.error


class Worker:
    """A thread that does jobs, until its owner is gone."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        # Not at exit: the thread must not keep the process from ending, and a file that is closed
        # under it could be another one by then.
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def add(self, job: Job) -> None:
        if not self.is_alive():
            self._thread = threading.Thread(
                target=_work, args=(self._jobs,), name="lightning_ckpt offload", daemon=True
            )
            self._thread.start()
        self._jobs.put(job)

    def is_alive(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


def _work(jobs: "SimpleQueue[Job | None]") -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # or it would stay here until the next one comes


class NamelessFile:
    """A file without a name in `directory`, opened at its first use.

    Raises:
        OSError: a file cannot be made, written or read; the text names the directory and the bytes.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._descriptor: int | None = None
        self._lock = threading.Lock()

    def write(self, source: memoryview, offset: int) -> None:
        self._all(os.pwrite, "write", source, offset)

    def read(self, into: memoryview, offset: int) -> None:
        self._all(_pread_into, "read", into, offset)

    def _all(self, call: Callable[..., int], verb: str, view: memoryview, offset: int) -> None:
        done = 0
        try:
            descriptor = self._open()
            while done < len(view):
                moved = call(descriptor, view[done:], offset + done)
                if moved == 0:
                    raise OSError(None, "the file ends there")
                done += moved
        except OSError as error:
            raise OSError(
                error.errno,
                f"offload to disk could not {verb} {len(view)} bytes (at byte {offset}) in "
                f"{self.directory}: {error.strerror}; free some room there, or give another "
                "OffloadConfig(directory=...)",
            ) from error

    def _open(self) -> int:
        with self._lock:
            if self._descriptor is None:
                self._descriptor = _open_nameless(self.directory)
                weakref.finalize(self, os.close, self._descriptor).atexit = False
            return self._descriptor


def _open_nameless(directory: str) -> int:
    # The private directory (mode 0700) is for systems where the file has a name for a moment.
    private = tempfile.mkdtemp(prefix="lightning_ckpt_", dir=directory)
    try:
        with tempfile.TemporaryFile(dir=private) as file:
            return os.dup(file.fileno())
    finally:
        os.rmdir(private)


def _pread_into(descriptor: int, view: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [view], offset)


def _memory(storage: torch.UntypedStorage) -> memoryview:
    """The bytes of a storage in host memory; valid as long as the storage is held."""
    length = storage.nbytes()
    return memoryview((ctypes.c_char * length).from_address(storage.data_ptr())).cast("B")


class _Stretch(NamedTuple):
    """Where in the file the bytes of one storage lie."""

    offset: int
    length: int
    num_bytes: int


class DiskTarget(Target):
    """A file in `directory`.

    Args:
        directory: an existing directory on a local file system.
    """

    def __init__(self, directory: str) -> None:
        self._file = NamelessFile(directory)
        self._worker = Worker()
        self._room = Extents()
        self._returned: deque[_Stretch] = deque()  # by any thread
        self._used = self._most_used = self._most_taken = 0

    def send(self, source: Source) -> Parcel:
        while self._returned:
            stretch = self._returned.popleft()
            self._room.give_back(stretch.offset, stretch.length)
            self._used -= stretch.num_bytes
        taken = self._room.take(source.num_bytes)
        assert taken is not None  # there is no limit
        self._used += source.num_bytes
        self._most_used = max(self._most_used, self._used)
        self._most_taken = max(self._most_taken, self._room.end)
        stretch = _Stretch(*taken, source.num_bytes)
        return _DiskParcel(self._file, self._worker, self._returned, source, stretch)

    @property
    def asked_bytes(self) -> int:
        return self._most_used

    @property
    def taken_bytes(self) -> int:
        return self._most_taken


class _DiskParcel(Parcel):
    def __init__(
        self,
        file: NamelessFile,
        worker: Worker,
        returned: deque[_Stretch],
        source: Source,
        stretch: _Stretch,
    ) -> None:
        self._file = file
        self._worker = worker
        self._returned = returned
        self._stretch = stretch
        self._needed_by = [True]  # the first to end of the two that need it: the write, the owner
        assert source.tensor is not None
        self._write = Job(partial(self._send, source.tensor))
        worker.add(self._write)

    def _send(self, tensor: Tensor) -> None:
        try:
            self._file.write(_memory(tensor.untyped_storage()), self._stretch.offset)
        finally:
            self._end()

    def has_ended(self) -> bool:
        return self._write.has_ended()

    def finish(self) -> None:
        self._write.wait(self._worker)

    def fetch(self) -> Arrival:
        self.finish()
        return _DiskArrival(self._file, self._worker, self._stretch)

    def discard(self) -> None:
        if self._write.cancel():
            self._end()
        self._end()

    def _end(self) -> None:
        """Called for the write and for the owner: the second gives the stretch back."""
        try:
            self._needed_by.pop()
        except IndexError:
            self._returned.append(self._stretch)


class _DiskArrival(Arrival):
    def __init__(self, file: NamelessFile, worker: Worker, stretch: _Stretch) -> None:
        # Here and not in the worker: dispatch modes, which may count bytes, belong to a thread.
        self._bytes = torch.empty(stretch.num_bytes, dtype=torch.uint8)
        self._worker = worker
        memory = _memory(self._bytes.untyped_storage())
        self._read = Job(partial(_receive, file, self._bytes, memory, stretch.offset))
        worker.add(self._read)

    def wait(self) -> torch.UntypedStorage:
        self._read.wait(self._worker)
        return self._bytes.untyped_storage()

    def abandon(self) -> None:
        self._read.cancel()


def _receive(file: NamelessFile, owner: Tensor, memory: memoryview, offset: int) -> None:
    """`owner` keeps the memory alive."""
    file.read(memory, offset)
