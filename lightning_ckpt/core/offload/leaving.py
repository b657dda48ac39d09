"""The copies out that are under way, in the order in which they began."""

import time
import weakref
from collections import deque
from typing import NamedTuple

from lightning_ckpt.core.offload.slots import Slot

_MOST_BYTES = 256 * 2**20  # beside those of the newest
_MOST_CALLS = 2


class Counts:
    """What a scheduler did so far, in bytes, fetches and seconds."""

    def __init__(self) -> None:
        self.out_bytes = 0
        self.in_bytes = 0
        self.no_room_bytes = 0
        self.num_ahead = 0
        self.num_on_demand = 0
        self.seconds_waited = 0.0

    def count_fetch(self, num_bytes: int, ahead: bool) -> None:
        self.in_bytes += num_bytes
        self.num_ahead += ahead
        self.num_on_demand += not ahead


class _Copy(NamedTuple):
    """A copy out under way. It is the slot's, and ends with it: if the graph is dropped, nobody has
    to wait for it."""

    slot: "weakref.ref[Slot]"
    num_bytes: int
    call_number: int


class Leaving:
    """The copies under way, oldest first.

    Args:
        counts: where the time that was waited for them is added.
    """

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._copies: deque[_Copy] = deque()

    def __len__(self) -> int:
        return len(self._copies)

    def add(self, slot: Slot, call_number: int) -> None:
        """A copy has begun. If too many are under way, wait for the oldest.

        Raises:
            OSError: a copy failed.
        """
        self._copies.append(_Copy(weakref.ref(slot), slot.source.num_bytes, call_number))
        while self._are_too_many():
            self._end_oldest()

    def look(self) -> None:
        """Let go of the sources whose copies have ended.

        Raises:
            OSError: a copy failed.
        """
        while self._copies and _has_ended(self._copies[0].slot()):
            self._end_oldest()

    def end_before(self, call_number: int) -> None:
        """Wait for those that began in earlier calls.

        Raises:
            OSError: a copy failed.
        """
        while self._copies and self._copies[0].call_number < call_number:
            self._end_oldest()

    def settle(self) -> None:
        """Wait for all of them.

        Raises:
            OSError: a copy failed.
        """
        while self._copies:
            self._end_oldest()

    def forget(self) -> None:
        """Let those stay that are under way."""
        while self._copies:
            slot = self._copies.popleft().slot()
            if slot is not None:
                slot.parcel = None

    def _are_too_many(self) -> bool:
        """Whether the compute has to wait, so that what is held for copies has a bound. The newest
        may always go."""
        oldest, newest = self._copies[0], self._copies[-1]
        is_late = newest.call_number - oldest.call_number >= _MOST_CALLS
        num_bytes = sum(copy.num_bytes for copy in self._copies) - newest.num_bytes
        return is_late or num_bytes > _MOST_BYTES

    def _end_oldest(self) -> None:
        """Wait for the oldest copy out, and let its source go. If it failed, the others under way
        are ended too: one failure ends one step, and not the next one as well."""
        error = self._end(self._copies.popleft().slot())
        if error is not None:
            while self._copies:
                self._end(self._copies.popleft().slot())
            raise error

    def _end(self, slot: Slot | None) -> OSError | None:
        """Wait for a copy out; returns why it failed."""
        if slot is None:
            return None
        assert slot.parcel is not None  # its copy began
        start = time.perf_counter()
        try:
            slot.parcel.finish()
        except OSError as error:
            slot.parcel = None  # the tensor is still here, and may leave with a later call
            return error
        finally:
            self._counts.seconds_waited += time.perf_counter() - start
        slot.is_out = True
        if not slot.is_wanted and not slot.stays:
            slot.source.let_go()
        return None


def _has_ended(slot: Slot | None) -> bool:
    if slot is None:
        return True
    assert slot.parcel is not None  # its copy began
    return slot.parcel.has_ended()
