"""What a source of peak memory has to offer."""

from abc import ABC, abstractmethod
from typing import Any


class PeakUnavailable(RuntimeError):
    """No honest figure can be had here; the message says why."""


class PeakTracker(ABC):
    """The peak of allocated bytes between `start` and `stop`, without the stretches in between
    that lie in `pause` ... `resume`. It starts paused, and each call may be made twice.

    `holders` are tensors that exist already, or what holds them: modules (with gradients),
    optimizers (with states), and dicts, lists, tuples, sets and dataclasses of such.
    """

    @abstractmethod
    def resume(self, *holders: Any) -> None:
        """Measure from here on, with the tensors in `holders` counted in."""

    @abstractmethod
    def pause(self) -> None:
        """Leave what comes out of the peak. What is freed meanwhile is not missed."""

    @abstractmethod
    def reset_peak(self, *holders: Any) -> None:
        """Let the peak start again, at the bytes that are live now."""

    @abstractmethod
    def backdate(self) -> None:
        """From here on, take tensors that nothing named and nothing made here for old ones when an
        operation meets them: count them in the peak as if they had been there at the reset. (DDP
        makes the buckets of its gradients beforehand, and nothing can name them.)"""

    @property
    @abstractmethod
    def met_bytes(self) -> int:
        """Bytes of those so far; 0 where the peak has all in it in any case."""

    @abstractmethod
    def stop(self) -> None:
        """Stop for good and forget all tensors. The figures can still be read."""

    @property
    @abstractmethod
    def peak_bytes(self) -> int:
        """The largest number of bytes that were live at once since the last reset."""

    @property
    @abstractmethod
    def current_bytes(self) -> int:
        """The bytes that are live now, as far as they are known."""
