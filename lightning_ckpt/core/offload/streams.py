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

from lightning_ckpt.core.offload.targets import Source, as_bytes


class Streams:
    """The stream for copies of each device, and how long others waited for it."""

    def __init__(self) -> None:
        self._streams: dict[torch.device, torch.Stream] = {}
        self._waits: deque[tuple[torch.Event, torch.Event]] = deque()
        self._milliseconds = 0.0

    def of(self, device: torch.device) -> torch.Stream:
        if device not in self._streams:
            self._streams[device] = torch.Stream(device)
        return self._streams[device]

    def wait_for(self, event: torch.Event, stream: torch.Stream) -> None:
        """Make `stream` wait for `event`, and measure for how long it does."""
        before = stream.record_event(torch.Event(stream.device, enable_timing=True))
        stream.wait_event(event)
        after = stream.record_event(torch.Event(stream.device, enable_timing=True))
        self._waits.append((before, after))
        self._sum_up()

    def seconds_waited(self) -> float:
        self._sum_up()
        return self._milliseconds / 1000

    def _sum_up(self) -> None:
        while self._waits and self._waits[0][1].query():
            before, after = self._waits.popleft()
            self._milliseconds += before.elapsed_time(after)


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
        # Before the other stream is entered: inside, "current" is that one.
        self._producer = torch.accelerator.current_stream(source.device)
        stream = streams.of(source.device)
        stream.wait_event(self._producer.record_event())
        with stream:
            start_copy(as_bytes(source.tensor.untyped_storage()), into)
        self.copied = stream.record_event()

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


def start_copy(source: Tensor, into: Tensor) -> None:
    """On the current stream, without waiting for it."""
    into.copy_(source, non_blocking=True)


def allocate(num_bytes: int, device: torch.device) -> Tensor:
    """Memory of the current stream."""
    return torch.empty(num_bytes, dtype=torch.uint8, device=device)
