"""Tensors wait in a file that has no name.

The file is unlinked before its first byte is written, so the system takes it back however the
process ends. Stretches of it are used again. A thread writes and reads.
"""

import ctypes
import os
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ckpt.core.offload.extents import Extents
from lightning_ckpt.core.offload.targets import (
    Arrival,
    Moved,
    Parcel,
    Source,
    Target,
    Timer,
    as_bytes,
)
from lightning_ckpt.core.offload.worker import Job, Worker


class NamelessFile:
    """A file without a name in `directory`, opened at its first use.

    Raises:
        OSError: a file cannot be made, written or read; the text names the directory and the bytes.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self._descriptor: int | None = None
        self._lock = threading.Lock()
        self.written, self.read_back = Timer(), Timer()

    def write(self, source: memoryview, offset: int) -> None:
        start = time.perf_counter()
        self._all(os.pwrite, "write", source, offset)
        self.written.add(len(source), time.perf_counter() - start)

    def read(self, into: memoryview, offset: int) -> None:
        start = time.perf_counter()
        self._all(_pread_into, "read", into, offset)
        self.read_back.add(len(into), time.perf_counter() - start)

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


def _memory(data: Tensor) -> memoryview:
    """The bytes of a flat tensor in host memory; valid as long as its storage is held."""
    return memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")


class _Stretch(NamedTuple):
    """Where in the file the bytes of one storage lie."""

    offset: int
    length: int
    num_bytes: int


class DiskTarget(Target):
    """A file in `directory`, for tensors in memory of the host.

    Args:
        directory: an existing directory on a local file system.
    """

    def __init__(self, directory: str) -> None:
        self.file = NamelessFile(directory)
        self.worker = Worker()
        self.returned: deque[_Stretch] = deque()  # by any thread
        self._room = Extents()
        self._used = self._most_used = self._most_taken = 0

    def send(self, source: Source) -> Parcel:
        assert source.tensor is not None
        data = as_bytes(source.tensor.untyped_storage())
        return self.write(data, owner=data, ready=None)

    def write(self, data: Tensor, owner: object, ready: Callable[[], None] | None) -> "DiskParcel":
        """Start to write.

        Args:
            data: flat bytes in memory of the host.
            owner: held until they are written.
            ready: waits, in the thread that writes, until the bytes are there.
        """
        self.moved()
        while self.returned:
            stretch = self.returned.popleft()
            self._room.give_back(stretch.offset, stretch.length)
            self._used -= stretch.num_bytes
        taken = self._room.take(data.nbytes)
        assert taken is not None  # there is no limit
        self._used += data.nbytes
        self._most_used = max(self._most_used, self._used)
        self._most_taken = max(self._most_taken, self._room.end)
        return DiskParcel(self, _Stretch(*taken, data.nbytes), data, owner, ready)

    def moved(self) -> tuple[Moved, Moved]:
        return self.file.written.moved(), self.file.read_back.moved()

    @property
    def asked_bytes(self) -> int:
        return self._most_used

    @property
    def taken_bytes(self) -> int:
        return self._most_taken


class DiskParcel(Parcel):
    """Bytes in the file, or on their way to it.

    Attributes:
        job: the write.
    """

    def __init__(
        self,
        target: DiskTarget,
        stretch: _Stretch,
        data: Tensor,
        owner: object,
        ready: Callable[[], None] | None,
    ) -> None:
        self._file = target.file
        self._worker = target.worker
        self._returned = target.returned
        self._stretch = stretch
        self._needed_by = [True]  # the first to end of the two that need it: the write, the owner
        self.job = Job(partial(self._write, data, owner, ready))
        self._worker.add(self.job)

    def _write(self, data: Tensor, owner: object, ready: Callable[[], None] | None) -> None:
        try:
            if ready is not None:
                ready()
            self._file.write(_memory(data), self._stretch.offset)
        finally:
            self._end()

    def has_ended(self) -> bool:
        return self.job.has_ended()

    def finish(self) -> None:
        self.job.wait(self._worker)

    def fetch(self) -> Arrival:
        self.finish()
        # Here and not in the worker: dispatch modes, which may count bytes, belong to a thread.
        data = torch.empty(self._stretch.num_bytes, dtype=torch.uint8)
        return self.read_into(data, owner=data)

    def read_into(self, data: Tensor, owner: object) -> "DiskArrival":
        """Start to read, once it is written, into flat bytes of `owner` in memory of the host."""
        read = Job(partial(_read, self._file, data, owner, self._stretch.offset))
        self._worker.add(read)
        return DiskArrival(read, self._worker, data)

    def discard(self) -> None:
        if self.job.cancel():
            self._end()
        self._end()

    def _end(self) -> None:
        """Called for the write and for the owner: the second gives the stretch back."""
        try:
            self._needed_by.pop()
        except IndexError:
            self._returned.append(self._stretch)


class DiskArrival(Arrival):
    """Bytes on their way from the file."""

    def __init__(self, read: Job, worker: Worker, data: Tensor) -> None:
        self._read = read
        self._worker = worker
        self._data = data

    def wait(self) -> torch.UntypedStorage:
        self._read.wait(self._worker)
        return self._data.untyped_storage()

    def abandon(self) -> None:
        self._read.cancel()


def _read(file: NamelessFile, data: Tensor, owner: object, offset: int) -> None:
    """`owner` keeps the memory alive."""
    file.read(_memory(data), offset)
