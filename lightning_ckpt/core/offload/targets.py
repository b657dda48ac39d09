"""What a place that tensors wait in has to offer. The scheduler knows no more of devices."""

from abc import ABC, abstractmethod
from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ckpt.core._torch import tensor_version


class Source:
    """A storage that is to leave, held until its copy has ended.

    Attributes:
        tensor: any tensor on the storage, without a graph; None once it was let go.
        version: autograd's count of in-place changes when the tensor was saved.
        num_bytes: the storage's size.
        device: where it was.
        is_changed: whether it was changed in place while the copy may have been running.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor: Tensor | None = tensor
        self.version = tensor_version(tensor)
        self.num_bytes = tensor.untyped_storage().nbytes()
        self.device = tensor.device
        self.is_changed = False

    def check(self) -> None:
        """Note whether it was changed in place since it was saved."""
        if self.tensor is not None and tensor_version(self.tensor) != self.version:
            self.is_changed = True

    def let_go(self) -> None:
        """The copy has ended. To be called by the training thread: an in-place operation counts
        only when it has ended, so another thread could look at the count in the middle of it."""
        self.check()
        self.tensor = None


class Arrival(ABC):
    """A copy on its way back."""

    @abstractmethod
    def wait(self) -> torch.UntypedStorage:
        """The bytes, ready for the stream that is current now."""

    def abandon(self) -> None:
        """Nobody will wait, and memory of the device may be free earlier than without this call."""
        return  # most hold none


class Parcel(ABC):
    """The copy of one storage at the target, until it is dropped."""

    @abstractmethod
    def has_ended(self) -> bool:
        """Whether the copy out has ended, well or not: then `finish` does not wait."""

    @abstractmethod
    def finish(self) -> None:
        """Wait until the source may be let go.

        Raises:
            OSError: the copy failed.
        """

    @abstractmethod
    def fetch(self) -> Arrival:
        """Start a copy in, after the copy out."""


class Moved(NamedTuple):
    """Copies in one direction that have ended, and the time that they themselves took (not the
    time that somebody waited for them)."""

    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def bytes_per_second(self) -> float | None:
        """None: nothing was copied."""
        return self.num_bytes / self.seconds if self.seconds else None


class Timer:
    """Adds up copies in one direction."""

    def __init__(self) -> None:
        self._new: deque[tuple[int, float]] = deque()
        self._sum = Moved()

    def add(self, num_bytes: int, seconds: float) -> None:
        """A copy has ended. May be called by any thread, and after a fork: it takes no lock."""
        self._new.append((num_bytes, seconds))

    def moved(self) -> Moved:
        """To be called under the scheduler's lock, now and then, so that nothing grows."""
        while self._new:
            num_bytes, seconds = self._new.popleft()
            self._sum = Moved(self._sum.num_bytes + num_bytes, self._sum.seconds + seconds)
        return self._sum


class Target(ABC):
    """A place that tensors wait in."""

    @abstractmethod
    def send(self, source: Source) -> Parcel | None:
        """Start a copy out, after what the current stream has been given so far.

        Returns:
            None if there is no room: the source has to stay.

        Raises:
            OSError: the place cannot be used.
        """

    @property
    @abstractmethod
    def asked_bytes(self) -> int:
        """The most bytes that were in use at once."""

    @property
    @abstractmethod
    def taken_bytes(self) -> int:
        """The most bytes that the place took for them, unused ones included."""

    def look(self) -> None:
        """Let go of memory of the device that nobody needs any more. Called often."""
        return  # most hold none

    def settle(self) -> None:
        """Wait until every copy out has come to its end.

        Raises:
            OSError: one failed that somebody needs.
        """
        return  # the parcels' `finish` says it all

    def staged_bytes(self) -> tuple[int, int]:
        """Pinned memory on the way to the place: the most that was in use at once, and what was
        taken for it."""
        return 0, 0

    def seconds_waited(self) -> float:
        """Time that the device waited for copies, as far as it is known by now."""
        return 0.0

    def moved(self) -> tuple[Moved, Moved]:
        """What was copied out, and in, as far as it is known by now."""
        return Moved(), Moved()


def as_bytes(storage: torch.UntypedStorage) -> Tensor:
    """All of a storage as a flat tensor of bytes."""
    empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
