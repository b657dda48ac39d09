"""Pinned memory of the host that is used again and again."""

from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ckpt.core.offload.extents import Extents
from lightning_ckpt.core.offload.lifetimes import Lifetimes

_CHUNK_BYTES = 256 * 2**20
_UNIT_BYTES = 512


class Room:
    """Memory of the host, which is nobody else's as long as somebody holds this.

    Attributes:
        bytes: the memory as a flat tensor.
    """

    def __init__(self, memory: Tensor) -> None:
        self.bytes = memory


class _Chunk:
    def __init__(self, device: torch.device, num_bytes: int, pin: bool) -> None:
        self.device = device
        self.bytes = torch.empty(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=pin)
        self.extents = Extents(limit=num_bytes, unit=_UNIT_BYTES)


class _Loan(NamedTuple):
    """What a room was made of."""

    chunk: _Chunk
    offset: int
    length: int
    num_bytes: int


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
        self._lent: Lifetimes[_Loan] = Lifetimes()
        self._used = 0
        self.most_used = 0
        self.pinned = 0

    def take(self, num_bytes: int, device: torch.device) -> Room | None:
        """Room for `num_bytes`, or None if the limit is reached or the system refuses.

        Two devices have no chunk in common: their streams do not wait for each other.
        """
        for loan in self._lent.ended():
            loan.chunk.extents.give_back(loan.offset, loan.length)
            self._used -= loan.num_bytes
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
        room = Room(chunk.bytes[stretch[0] : stretch[0] + num_bytes])
        self._lent.watch(room, _Loan(chunk, *stretch, num_bytes))
        return room

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
