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
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from lightning_ckpt.core.offload.extents import Extents
from lightning_ckpt.core.offload.lifetimes import Lifetimes
from lightning_ckpt.core.offload.targets import (
    Arrival,
    Moved,
    Parcel,
    Source,
    Target,
    Timer,
    as_bytes,
)
from lightning_ckpt.core.offload.worker import Job, Worker, check_process


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
            return self._descriptor

    def close(self) -> None:
        """Give the file back to the system, when nobody writes or reads any more."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _open_nameless(directory: str) -> int:
    # The private directory (mode 0700) is for systems where the file has a name for a moment.
    with (
        tempfile.TemporaryDirectory(prefix="lightning_ckpt_", dir=directory) as private,
        tempfile.TemporaryFile(dir=private) as file,
    ):
        return os.dup(file.fileno())


def _pread_into(descriptor: int, view: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [view], offset)


def _memory(data: Tensor) -> memoryview:
    """The bytes of a flat tensor in host memory; valid as long as its storage is held."""
    return memoryview((ctypes.c_char * data.nbytes).from_address(data.data_ptr())).cast("B")


class _Stretch:
    """Where bytes lie in the file: nobody else's as long as somebody holds this."""

    def __init__(self, offset: int) -> None:
        self.offset = offset


class DiskTarget(Target):
    """A file in `directory`, for tensors in memory of the host.

    Args:
        directory: an existing directory on a local file system.
    """

    def __init__(self, directory: str) -> None:
        self._begin(directory)
        self._most_used = self._most_taken = 0

    def _begin(self, directory: str) -> None:
        """An empty file, of this process."""
        self._process = os.getpid()
        self.file = NamelessFile(directory)
        self.worker = Worker(self.file.close)
        self._room = Extents()
        self._lent: Lifetimes[tuple[int, int, int]] = Lifetimes()  # offset, length, bytes in use
        self._used = 0

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
        if self._process != os.getpid():  # Note: [Forks]
            self._begin(self.file.directory)
        self.moved()
        for offset, length, num_bytes in self._lent.ended():
            self._room.give_back(offset, length)
            self._used -= num_bytes
        taken = self._room.take(data.nbytes)
        assert taken is not None  # there is no limit
        stretch = _Stretch(taken[0])
        self._lent.watch(stretch, (*taken, data.nbytes))
        self._used += data.nbytes
        self._most_used = max(self._most_used, self._used)
        self._most_taken = max(self._most_taken, self._room.end)
        return DiskParcel(self, stretch, data, owner, ready)

    def moved(self) -> tuple[Moved, Moved]:
        return self.file.written.moved(), self.file.read_back.moved()

    @property
    def asked_bytes(self) -> int:
        return self._most_used

    @property
    def taken_bytes(self) -> int:
        return self._most_taken


class DiskParcel(Parcel):
    """Bytes in the file, or on their way to it. Who is to write knows it weakly: if its graph is
    dropped before, all that it holds is free at once.

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
        self.file = target.file
        self.stretch = stretch
        self._worker = target.worker
        self._process = os.getpid()
        self._num_bytes = data.nbytes
        self._source: tuple[Tensor, object] | None = data, owner
        self._ready = ready
        self.job = Job(partial(_do_for, weakref.ref(self)))
        self._worker.add(self.job)

    def do(self) -> None:
        """Write."""
        assert self._source is not None
        if self._ready is not None:
            self._ready()
        self.file.write(_memory(self._source[0]), self.stretch.offset)
        self._source = self._ready = None

    def has_ended(self) -> bool:
        return self.job.has_ended()

    def finish(self) -> None:
        self.job.wait()

    def fetch(self) -> Arrival:
        self.finish()
        # Here and not in the worker: dispatch modes, which may count bytes, belong to a thread.
        data = torch.empty(self._num_bytes, dtype=torch.uint8)
        return self.read_into(data, owner=data)

    def read_into(self, data: Tensor, owner: object) -> "DiskArrival":
        """Start to read, once it is written, into flat bytes of `owner` in memory of the host.

        Raises:
            RuntimeError: another process wrote it.
        """
        check_process(self._process)
        return DiskArrival(self, self._worker, data, owner)


class DiskArrival(Arrival):
    """Bytes on their way from the file; the thread that reads knows it weakly."""

    def __init__(self, parcel: DiskParcel, worker: Worker, data: Tensor, owner: object) -> None:
        self._parcel = parcel
        self._data = data
        self._owner = owner
        self._job = Job(partial(_do_for, weakref.ref(self)))
        worker.add(self._job)

    def do(self) -> None:
        """Read."""
        self._parcel.file.read(_memory(self._data), self._parcel.stretch.offset)

    def wait(self) -> torch.UntypedStorage:
        self._job.wait()
        return self._data.untyped_storage()


def _do_for(wanted_by: "weakref.ref[DiskParcel] | weakref.ref[DiskArrival]") -> None:
    """Write or read, if anybody still wants it; whoever does holds the memory meanwhile."""
    copy = wanted_by()
    if copy is not None:
        copy.do()
