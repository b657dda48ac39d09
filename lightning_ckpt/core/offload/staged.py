"""Tensors of a device wait in a file; memory of the host is a stage between the two.

Note: [Stage]
A tensor goes from the device to a buffer by the copying stream, and from there to the file by the
thread that writes. Its source is let go as soon as the first has ended. Back, the thread reads into
a buffer, and the copy to the device is given to the stream that is current when backward asks, so
memory of the device is taken then and no earlier.

The host reads and writes buffers as well, so the order of a stream does not protect them here:

- the thread waits for the device's copy before it writes;
- a buffer is used again when no job and no arrival holds it any more, and when the device's copy
  from it or into it was seen to have ended;
- where there is no more pinned memory, the training thread waits for copies under way. If nothing
  is under way (the limit is less than one tensor, or the system refuses to pin), memory that is
  not pinned does, for one tensor at a time on the way out.
"""

import weakref
from collections import deque

import torch
from torch import Tensor

from lightning_ckpt.core.offload import streams as device_streams
from lightning_ckpt.core.offload.disk import DiskArrival, DiskParcel, DiskTarget
from lightning_ckpt.core.offload.pool import PinnedPool, Room
from lightning_ckpt.core.offload.streams import CopyOut, Streams
from lightning_ckpt.core.offload.targets import Arrival, Moved, Parcel, Source, Target
from lightning_ckpt.core.offload.worker import Job


class StagedTarget(Target):
    """A file, for tensors of devices and of the host.

    Args:
        disk: the file.
        pool: the memory between it and the devices.
    """

    def __init__(self, disk: DiskTarget, pool: PinnedPool) -> None:
        self._disk = disk
        self._stage = _Stage(pool)
        self._streams = Streams()

    def send(self, source: Source) -> Parcel:
        if is_of_the_host(source.device):
            return self._disk.send(source)
        self._stage.check_writes()
        buffer = self._stage.take(source.num_bytes, source.device)
        copy = CopyOut(self._streams, source, buffer.bytes)
        self._stage.hold(buffer, copy.copied)
        write = self._disk.write(buffer.bytes, owner=buffer, ready=copy.copied.synchronize)
        parcel = _StagedParcel(self._stage, copy, write, source)
        self._stage.add_write(write.job, parcel)
        return parcel

    def settle(self) -> None:
        self._stage.settle()

    def staged_bytes(self) -> tuple[int, int]:
        return self._stage.pool.most_used, self._stage.pool.pinned

    def seconds_waited(self) -> float:
        return self._streams.seconds_waited()

    def moved(self) -> tuple[Moved, Moved]:
        """Those of the file, which is the slower part of the way."""
        return self._disk.moved()

    @property
    def asked_bytes(self) -> int:
        return self._disk.asked_bytes

    @property
    def taken_bytes(self) -> int:
        return self._disk.taken_bytes


class _Stage:
    """The buffers, and what goes on with them. Used under the scheduler's lock."""

    def __init__(self, pool: PinnedPool) -> None:
        self.pool = pool
        self._copies: list[tuple[torch.Event, Room]] = []  # of devices
        self._writes: deque[tuple[Job, weakref.ref[Parcel]]] = deque()

    def take(self, num_bytes: int, device: torch.device) -> Room:
        while True:
            self._copies = [copy for copy in self._copies if not copy[0].query()]
            room = self.pool.take(num_bytes, device)
            if room is not None:
                return room
            if not (self._wait_for_write() or self._wait_for_copy()):
                return Room(plain_memory(num_bytes))

    def hold(self, buffer: Room, copied: torch.Event) -> None:
        """Keep `buffer` until the device has come to `copied`."""
        self._copies.append((copied, buffer))

    def add_write(self, job: Job, parcel: Parcel) -> None:
        self._writes.append((job, weakref.ref(parcel)))

    def check_writes(self) -> None:
        """Forget the writes that have ended.

        Raises:
            OSError: one failed that somebody needs; the others under way have ended as well then,
                so that one failure ends one step.
        """
        while self._writes and self._writes[0][0].has_ended():
            job, parcel = self._writes.popleft()
            if job.error is not None and parcel() is not None:
                while self._wait_for_write():
                    pass
                self._writes.clear()
                raise job.error

    def settle(self) -> None:
        """Wait for all writes.

        Raises:
            OSError: one failed that somebody needs.
        """
        while self._wait_for_write():
            pass
        self.check_writes()

    def _wait_for_write(self) -> bool:
        """Wait for a write under way; whether there was one. Errors are for whoever needs it."""
        job = next((job for job, _ in self._writes if not job.has_ended()), None)
        if job is not None:
            job.run()
        return job is not None

    def _wait_for_copy(self) -> bool:
        """Wait for a copy of a device that is under way; whether there was one."""
        if self._copies:
            self._copies[0][0].synchronize()
        return bool(self._copies)


class _StagedParcel(Parcel):
    """Note: [Stage]."""

    def __init__(self, stage: _Stage, copy: CopyOut, write: DiskParcel, source: Source) -> None:
        self._stage = stage
        self._copy = copy
        self._write = write
        self._num_bytes = source.num_bytes
        self._device = source.device

    def has_ended(self) -> bool:
        return self._copy.has_ended()

    def finish(self) -> None:
        self._copy.finish()

    def fetch(self) -> Arrival:
        self._write.finish()
        buffer = self._stage.take(self._num_bytes, self._device)
        read = self._write.read_into(buffer.bytes, owner=buffer)
        return _StagedArrival(self._stage, read, buffer, self._device)


class _StagedArrival(Arrival):
    """Note: [Stage]."""

    def __init__(
        self, stage: _Stage, read: DiskArrival, buffer: Room, device: torch.device
    ) -> None:
        self._stage = stage
        self._read = read
        self._buffer = buffer
        self._device = device

    def wait(self) -> torch.UntypedStorage:
        self._read.wait()
        data = self._buffer.bytes
        into = device_streams.allocate(data.nbytes, self._device)
        device_streams.start_copy(data, into)
        copied = torch.accelerator.current_stream(self._device).record_event()
        self._stage.hold(self._buffer, copied)
        return into.untyped_storage()


def is_of_the_host(device: torch.device) -> bool:
    return device.type == "cpu"


def plain_memory(num_bytes: int) -> Tensor:
    """Memory of the host that is not pinned."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
