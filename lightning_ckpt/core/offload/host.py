"""Tensors wait in pinned memory of the host."""

import torch
from torch import Tensor

from lightning_ckpt.core.offload import streams as device_streams
from lightning_ckpt.core.offload.pool import PinnedPool, Room
from lightning_ckpt.core.offload.streams import CopyOut, Streams
from lightning_ckpt.core.offload.targets import Arrival, Moved, Parcel, Source, Target


class HostTarget(Target):
    """Pinned memory of the host, for all accelerators that `torch.accelerator` knows.

    Args:
        pool: the memory.
    """

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool
        self._streams = Streams()

    def send(self, source: Source) -> Parcel | None:
        room = self._pool.take(source.num_bytes, source.device)
        return None if room is None else _HostParcel(self._streams, source, room)

    def look(self) -> None:
        for key, (stream, _) in list(_arriving.items()):
            if stream.query():
                _arriving.pop(key, None)

    def settle(self) -> None:
        self._streams.settle()

    def seconds_waited(self) -> float:
        return self._streams.seconds_waited()

    def moved(self) -> tuple[Moved, Moved]:
        return self._streams.moved()

    @property
    def asked_bytes(self) -> int:
        return self._pool.most_used

    @property
    def taken_bytes(self) -> int:
        return self._pool.pinned


class _HostParcel(Parcel):
    def __init__(self, streams: Streams, source: Source, room: Room) -> None:
        self._streams = streams
        self._room = room
        self._device = source.device
        self._copy = CopyOut(streams, source, room.bytes)

    def has_ended(self) -> bool:
        return self._copy.has_ended()

    def finish(self) -> None:
        self._copy.finish()

    def fetch(self) -> Arrival:
        return _HostArrival(self._streams, self._room, self._device)


# What copies write to now, and the streams that copy. If an arrival is dropped before its copy has
# ended, its memory must not be free at once, and no code of ours runs then (Note: [Interrupts]).
_arriving: dict[int, tuple[torch.Stream, Tensor]] = {}


class _HostArrival(Arrival):
    """See the note on streams."""

    def __init__(self, streams: Streams, room: Room, device: torch.device) -> None:
        self._streams = streams
        self._bytes = device_streams.allocate(room.bytes.nbytes, device)
        _arriving[id(self._bytes)] = streams.of(device), self._bytes
        self._home, self._copied = streams.copy(room.bytes, self._bytes, device, streams.back)

    def wait(self) -> torch.UntypedStorage:
        current = torch.accelerator.current_stream(self._bytes.device)
        self._streams.wait_for(self._copied, current)
        if current != self._home:
            self._home.wait_event(self._copied)
            self._bytes.record_stream(current)
        self._let_go()
        return self._bytes.untyped_storage()

    def abandon(self) -> None:
        self._home.wait_event(self._copied)
        self._let_go()

    def _let_go(self) -> None:
        _arriving.pop(id(self._bytes), None)
