"""Copies between a device and memory of the host, by a stream of their own.

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

from lightning_ckpt.core.offload.targets import Moved, Source, Timer, as_bytes


class Streams:
    """The stream for copies of each device, and how long others waited for it."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._waits: deque[tuple[torch.Event, torch.Event]] = deque()
        self._milliseconds = 0.0
        self._copies: deque[tuple[torch.Event, torch.Event, int, Timer]] = deque()
        self.out, self.back = Timer(), Timer()

    def of(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    def wait_for(self, event: torch.Event, stream: torch.Stream) -> None:
        """Make `stream` wait for `event`, and measure for how long it does."""
        before = _record(stream)
        stream.wait_event(event)
        self._waits.append((before, _record(stream)))

    def copy(
        self, source: Tensor, into: Tensor, device: torch.device, timer: Timer
    ) -> tuple[torch.Stream, torch.Event]:
        """Start a copy, after what the current stream was given so far.

        Returns:
            The stream that is current, and the event at the copy's end.
        """
        # Before the other stream is entered: inside, "current" is that one.
        current = torch.accelerator.current_stream(device)
        stream = self.of(device)
        stream.wait_event(current.record_event())
        begun = _record(stream)
        with stream:
            start_copy(source, into)
        copied = _record(stream)
        self._copies.append((begun, copied, into.nbytes, timer))
        self._sum_up()
        return current, copied

    def settle(self) -> None:
        """Wait until all copies have ended."""
        for stream in self._streams.values():
            stream.synchronize()

    def seconds_waited(self) -> float:
        self._sum_up()
        return self._milliseconds / 1000

    def moved(self) -> tuple[Moved, Moved]:
        """What was copied out, and in, so far."""
        self._sum_up()
        return self.out.moved(), self.back.moved()

    def _sum_up(self) -> None:
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._milliseconds += before.elapsed_time(after)
        while self._copies and self._copies[0][1].query():
            begun, copied, num_bytes, timer = self._copies.popleft()
            timer.add(num_bytes, begun.elapsed_time(copied) / 1000)
            timer.moved()


class CopyOut:
    """A copy of a storage to the host, which begins now (Note: [Streams]).

    Args:
        streams: whose stream copies.
        source: the storage.
        into: as many bytes, in memory of the host.

    Attributes:
        copied: the event at its end.
    """

    def __init__(self, streams: Streams, source: Source, into: Tensor) -> None:
        self._streams = streams
        self._device = source.device
        assert source.tensor is not None
        data = as_bytes(source.tensor.untyped_storage())
        self._producer, self.copied = streams.copy(data, into, source.device, streams.out)

    def has_ended(self) -> bool:
        return bool(self.copied.query())

    def finish(self) -> None:
        """Make sure that the source may be let go; the host does not wait."""
        if self.copied.query():
            return
        current = torch.accelerator.current_stream(self._device)
        self._streams.wait_for(self.copied, current)
        if self._producer != current:
            self._producer.wait_event(self.copied)


def _record(stream: torch.Stream) -> torch.Event:
    """An event that tells when the stream came to it."""
    return stream.record_event(torch.Event(stream.device, enable_timing=True))


def start_copy(source: Tensor, into: Tensor) -> None:
    """On the current stream, without waiting for it."""
    into.copy_(source, non_blocking=True)


def allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Memory of the current stream."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
