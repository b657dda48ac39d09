"""Tensors wait in pinned memory of the host, copied by a stream of their own.

Note: [Streams]
Each device has one stream for copies in both directions. So a copy in comes after its own copy out,
and a stretch of pinned memory that is used again is first read and then written, without further
care. Between that stream and the ones that compute stand events:

- a copy out waits for what the current stream was given before it;
- a source is let go when its copy was seen to have ended, or when the stream that made the source
  (and the one that is current) was told to wait for it. The allocator gives its memory to work that
  comes later on that stream. Torch's rule is that whoever uses a tensor on another stream than its
  own tells the allocator, so other streams are safe as well;
- a copy in waits for what the current stream was given before it, since the allocator may give it
  memory which that stream still reads;
- whoever uses the bytes makes the stream wait that is current *then*; who drops them unused makes
  the stream wait that they were allocated on.
"""

from collections import deque

import torch
from torch import Tensor

from lightning_ckpt.core.offload.extents import Extents
from lightning_ckpt.core.offload.targets import Arrival, Parcel, Source, Target, as_bytes

_CHUNK_BYTES = 256 * 2**20
_UNIT_BYTES = 512


class Room:
    """A stretch of a chunk of pinned memory."""

    def __init__(self, chunk: "_Chunk", offset: int, length: int, num_bytes: int) -> None:
        self.bytes = chunk.bytes[offset : offset + num_bytes]
        self.num_bytes = num_bytes
        self.stretch = (offset, length)
        self.chunk = chunk


class _Chunk:
    def __init__(self, device: torch.device, num_bytes: int, pin: bool) -> None:
        self.device = device
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
        self.extents = Extents(limit=num_bytes, unit=_UNIT_BYTES)


class PinnedPool:
    """Pinned memory that is used again and again: to pin some takes milliseconds.

    It is taken in chunks of powers of two, since torch rounds each request up to one.

    Args:
        max_bytes: pinned bytes at most.
        pin: False for tests on machines where nothing can be pinned.
    """

    def __init__(self, max_bytes: int, pin: bool = True) -> None:
        self._max_bytes = max_bytes
        self._pin = pin
        self._chunks: list[_Chunk] = []
        self._returned: deque[Room] = deque()  # by any thread
        self._used = 0
        self.most_used = 0
        self.pinned = 0

    def take(self, num_bytes: int, device: torch.device) -> Room | None:
        """Room for `num_bytes`, or None if the limit is reached or the system refuses.

        Two devices have no chunk in common: their streams do not wait for each other.
        """
        while self._returned:
            room = self._returned.popleft()
            room.chunk.extents.give_back(*room.stretch)
            self._used -= room.num_bytes
        for chunk in (chunk for chunk in self._chunks if chunk.device == device):
            if (stretch := chunk.extents.take(num_bytes)) is not None:
                break
        else:
            new = self._new_chunk(num_bytes, device)
            stretch = new.extents.take(num_bytes) if new is not None else None
            if new is None or stretch is None:
                return None
            chunk = new
        self._used += num_bytes
        self.most_used = max(self.most_used, self._used)
        return Room(chunk, *stretch, num_bytes)

    def give_back(self, room: Room) -> None:
        """Called by any thread, at any time."""
        self._returned.append(room)

    def _new_chunk(self, num_bytes: int, device: torch.device) -> _Chunk | None:
        least = max(_power_of_two(num_bytes), _UNIT_BYTES)
        size = max(least, _CHUNK_BYTES)
        while size > least and self.pinned + size > self._max_bytes:
            size //= 2
        if self.pinned + size > self._max_bytes:
            return None
        try:
            chunk = _Chunk(device, size, self._pin)
        except RuntimeError:  # the system refuses to pin so much: then tensors stay on the device
            return None
        self._chunks.append(chunk)
        self.pinned += size
        return chunk


def _power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()


class HostTarget(Target):
    """Pinned memory of the host, for all accelerators that `torch.accelerator` knows.

    Args:
        pool: the memory.
    """

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool
        self._streams: dict[torch.device, torch.Stream] = {}
        self._waits: deque[tuple[torch.Event, torch.Event]] = deque()
        self._milliseconds = 0.0

    def send(self, source: Source) -> Parcel | None:
        room = self._pool.take(source.num_bytes, source.device)
        if room is None:
            return None
        if source.device not in self._streams:
            self._streams[source.device] = torch.Stream(source.device)
        return _HostParcel(self, self._streams[source.device], source, room)

    def wait_for(self, event: torch.Event, stream: torch.Stream) -> None:
        """Make `stream` wait for `event`, and measure for how long it does."""
        before = stream.record_event(torch.Event(stream.device, enable_timing=True))
        stream.wait_event(event)
        after = stream.record_event(torch.Event(stream.device, enable_timing=True))
        self._waits.append((before, after))
        self._sum_up()

    def give_back(self, room: Room) -> None:
        self._pool.give_back(room)

    def seconds_waited(self) -> float:
        self._sum_up()
        return self._milliseconds / 1000

    def _sum_up(self) -> None:
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._milliseconds += before.elapsed_time(after)

    @property
    def asked_bytes(self) -> int:
        return self._pool.most_used

    @property
    def taken_bytes(self) -> int:
        return self._pool.pinned


class _HostParcel(Parcel):
    """Note: [Streams]."""

    def __init__(
        self, target: HostTarget, stream: torch.Stream, source: Source, room: Room
    ) -> None:
        self._target = target
        self._stream = stream
        self._room = room
        self._device = source.device
        assert source.tensor is not None
        # Before the other stream is entered: inside, "current" is that one.
        self._producer = torch.accelerator.current_stream(source.device)
        stream.wait_event(self._producer.record_event())
        with stream:
            _copy(as_bytes(source.tensor.untyped_storage()), room.bytes)
        self._copied = stream.record_event()

    def has_ended(self) -> bool:
        return bool(self._copied.query())

    def finish(self) -> None:
        if self._copied.query():
            return
        current = torch.accelerator.current_stream(self._device)
        self._target.wait_for(self._copied, current)
        if self._producer != current:
            self._producer.wait_event(self._copied)

    def fetch(self) -> Arrival:
        return _HostArrival(self._target, self._stream, self._room, self._device)

    def discard(self) -> None:
        # The copy may be under way, and the source be freed now: what is read then, nobody needs.
        self._target.give_back(self._room)


class _HostArrival(Arrival):
    """Note: [Streams]."""

    def __init__(
        self, target: HostTarget, stream: torch.Stream, room: Room, device: torch.device
    ) -> None:
        self._target = target
        self._room = room
        self._home = torch.accelerator.current_stream(device)
        self._bytes: Tensor | None = _allocate(room.num_bytes, device)
        stream.wait_event(self._home.record_event())
        with stream:
            _copy(room.bytes, self._bytes)
        self._copied = stream.record_event()

    def wait(self) -> torch.UntypedStorage:
        assert self._bytes is not None
        current = torch.accelerator.current_stream(self._bytes.device)
        self._target.wait_for(self._copied, current)
        if current != self._home:
            self._home.wait_event(self._copied)
            self._bytes.record_stream(current)
        storage = self._bytes.untyped_storage()
        self._bytes = None
        return storage

    def abandon(self) -> None:
        if self._bytes is not None:
            self._home.wait_event(self._copied)
            self._bytes = None


def _copy(source: Tensor, into: Tensor) -> None:
    """On the current stream, without waiting for it."""
    into.copy_(source, non_blocking=True)


def _allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Memory of the current stream."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
