"""What the schedule is about: saved storages, the calls that saved them, and waves of calls."""

import weakref
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

import torch

from lightning_ckpt.core.offload.lifetimes import Lifetimes
from lightning_ckpt.core.offload.targets import Arrival, Parcel, Source

if TYPE_CHECKING:
    from lightning_ckpt.core.offload.schedule import Scheduler


_MOST_ORDERS = 16  # waves of so many different lengths are remembered


class Slot:
    """A storage that was saved, wherever its bytes are at the moment."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.parcel: Parcel | None = None  # None: it did not leave so far
        self.arrival: Arrival | None = None
        self.is_out = False  # the copy at the target is complete
        self.is_wanted = False  # expected to be asked for soon
        self.stays = False  # whatever happens
        self.held: torch.UntypedStorage | None = None  # restored
        self.num_pending = 0  # times that it was saved and not yet asked for
        self.last_call: weakref.ref[Call] | None = None

    def is_away(self) -> bool:
        """Whether nothing of it is here."""
        return self.source.tensor is None and self.held is None and self.arrival is None

    def rest(self) -> None:
        """Nobody is expected: let go of what is not only here."""
        self.is_wanted = False
        self.held = None
        if self.arrival is not None:
            self.arrival.abandon()
            self.arrival = None
        if self.is_out and not self.stays:
            self.source.let_go()


class Call:
    """One call of a block."""

    def __init__(self, scheduler: "Scheduler", wave: "Wave", position: int) -> None:
        self.scheduler = scheduler
        self.wave = wave
        self.position = position
        self.is_asked_for = False
        self._slots: list[weakref.ref[Slot]] = []

    def add(self, slot: Slot) -> None:
        slot.last_call = weakref.ref(self)
        slot.num_pending += 1
        self._slots.append(weakref.ref(slot))

    def live_slots(self) -> list[Slot]:
        """Its slots that a graph still needs, each once."""
        return live(self._slots)


def live(references: Iterable["weakref.ref[Slot]"]) -> list[Slot]:
    """What is left of them, each once."""
    found = (reference() for reference in references)
    return [slot for slot in dict.fromkeys(found) if slot is not None]


class Wave:
    """The calls between two backward passes, and the order in which backward asks for them."""

    def __init__(self) -> None:
        self.num_calls = 0
        self.order: list[int] = []  # as it was this time
        self.expected: list[int] | None = None  # None: no backward yet
        self._calls: dict[int, weakref.ref[Call]] = {}  # those that live
        self._lifetimes: Lifetimes[int] = Lifetimes()

    def add(self, call: Call) -> None:
        """The next call."""
        for position in self._lifetimes.ended():
            self._calls.pop(position, None)
        self._lifetimes.watch(call, call.position)
        self._calls[call.position] = weakref.ref(call)
        self.num_calls += 1

    def live_calls(self) -> list[Call]:
        return [call for reference in self._calls.values() if (call := reference()) is not None]

    def is_over(self) -> bool:
        """Whether the next call begins another wave: backward began, or all graphs were dropped."""
        return self.expected is not None or not any(map(self._call_at, self._calls))

    def after(self, call: Call, number: int) -> list[Call]:
        """The `number` live calls that are expected to be asked for after `call`."""
        assert self.expected is not None
        start = self.expected.index(call.position) + 1
        calls = map(self._call_at, islice(self.expected, start, None))
        return list(islice((call for call in calls if call is not None), number))

    def _call_at(self, position: int) -> Call | None:
        reference = self._calls.get(position)
        return None if reference is None else reference()


class Orders:
    """In what order backward asked for the calls of former waves: Note: [Order] of the schedule."""

    def __init__(self) -> None:
        self._orders: OrderedDict[int, list[int]] = OrderedDict()  # by number of calls

    def __len__(self) -> int:
        return len(self._orders)

    def expect(self, wave: Wave) -> None:
        """Backward of this wave begins."""
        learned = list(self._orders.pop(wave.num_calls, ()))
        rest = [p for p in reversed(range(wave.num_calls)) if p not in learned]
        wave.expected = learned + rest
        self._orders[wave.num_calls] = wave.order
        if len(self._orders) > _MOST_ORDERS:
            self._orders.popitem(last=False)


class Place(NamedTuple):
    """What autograd holds in place of a tensor."""

    slot: Slot
    call: Call
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
