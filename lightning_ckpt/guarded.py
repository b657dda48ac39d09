"""Instruments that never end a training: what fails warns once, and is gone."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from lightning.pytorch.utilities import rank_zero_warn

from lightning_ckpt.core.memory.peak import PeakUnavailable


class Stops(Protocol):
    """Something that can be let go of."""

    def stop(self) -> None:
        """Let go; may be called twice."""


T = TypeVar("T", bound=Stops)
V = TypeVar("V")


class Guarded(Generic[T]):
    """An instrument, or nothing where it could not be made or has failed.

    Args:
        what: what is not logged without it, for the warning.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._held: T | None = None

    def __bool__(self) -> bool:
        return self._held is not None

    def start(self, make: Callable[[], T]) -> None:
        """Make it anew."""
        self.stop()
        try:
            self._held = make()
        except Exception as error:
            self.give_up(reason_of(error))

    def do(self, action: Callable[[T], V]) -> V | None:
        """What `action` returns of it; None without it."""
        if self._held is None:
            return None
        try:
            return action(self._held)
        except Exception as error:
            self.give_up(reason_of(error))
            return None

    def give_up(self, reason: str) -> None:
        """Warn, and go on without it."""
        rank_zero_warn(f"`PeakMemoryMonitor` logs no {self._what}: {reason}.")
        self.stop()

    def stop(self) -> None:
        """Let go of it."""
        held, self._held = self._held, None
        if held is not None:
            try:
                held.stop()
            except Exception as error:
                rank_zero_warn(f"`PeakMemoryMonitor` could not end: {reason_of(error)}.")


def reason_of(error: Exception) -> str:
    """What to say of it."""
    if isinstance(error, PeakUnavailable):
        return str(error)
    return f"it could not be read ({type(error).__name__}: {error})"
