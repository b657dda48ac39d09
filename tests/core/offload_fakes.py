"""A place to offload to that takes its time, and watches how it is used."""

import weakref

import torch
from torch import Tensor

from lightning_ckpt.core.offload.schedule import Scheduler
from lightning_ckpt.core.offload.slots import Call, Place
from lightning_ckpt.core.offload.targets import Arrival, Parcel, Source, Target, as_bytes


class FakeTarget(Target):
    """Copies at the last possible moment: when it is asked the `delay`-th time whether it has, or
    told to finish. It holds no source, so one that was let go too early is seen."""

    def __init__(self, delay: int = 0, room: int | None = None) -> None:
        self.delay = delay
        self.room = room
        self.log: list[str] = []
        self.parcels: weakref.WeakSet[FakeParcel] = weakref.WeakSet()
        self.fails = False

    def send(self, source: Source) -> Parcel | None:
        if self.room is not None and self.num_kept >= self.room:
            return None
        parcel = FakeParcel(self, source)
        self.parcels.add(parcel)
        self.log.append(f"out {parcel.label}")
        return parcel

    @property
    def num_kept(self) -> int:
        """Copies that somebody may still ask for."""
        return len(self.parcels)

    @property
    def asked_bytes(self) -> int:
        return 0

    @property
    def taken_bytes(self) -> int:
        return 0


class FakeParcel(Parcel):
    def __init__(self, target: FakeTarget, source: Source) -> None:
        assert source.tensor is not None
        self.target = target
        self.label = label(source.tensor)
        self._storage = weakref.ref(source.tensor.untyped_storage())
        self._delay = target.delay
        self._copy: Tensor | None = None

    def has_ended(self) -> bool:
        self._delay -= 1
        if self._delay < 0 and not self.target.fails:
            self.finish()
        return self._delay < 0

    def finish(self) -> None:
        if self.target.fails:
            raise OSError("no space left")
        if self._copy is None:
            storage = self._storage()
            assert storage is not None, "the source was let go before its copy had ended"
            self._copy = as_bytes(storage).clone()

    def fetch(self) -> Arrival:
        assert self._copy is not None, "a copy in before its copy out"
        self.target.log.append(f"in {self.label}")
        return FakeArrival(self._copy)


class FakeArrival(Arrival):
    def __init__(self, copy: Tensor) -> None:
        self._copy: Tensor | None = copy

    def wait(self) -> torch.UntypedStorage:
        assert self._copy is not None, "abandoned, or waited for twice"
        copy, self._copy = self._copy, None
        return copy.clone().untyped_storage()

    def abandon(self) -> None:
        self._copy = None


def tensor(number: int, num_bytes: int = 64) -> Tensor:
    """A tensor that knows its number."""
    return torch.full((num_bytes // 4,), float(number))


def label(tensor: Tensor) -> int:
    return int(tensor.flatten()[0])


def forward(scheduler: Scheduler, numbers: list[int]) -> dict[int, Place]:
    """One call for each number, that saves one tensor."""
    return {n: scheduler.save(scheduler.open_call(), tensor(n)) for n in numbers}


def ask(place: Place) -> int:
    """What backward gets: the number of the tensor."""
    return label(restored(place))


def restored(place: Place) -> Tensor:
    storage = place.call.scheduler.use(place)
    return torch.empty(0, dtype=place.dtype).set_(storage, place.offset, place.size, place.stride)


def is_here(place: Place) -> bool:
    """Whether the device holds bytes of it."""
    slot = place.slot
    return slot.source.tensor is not None or slot.held is not None or slot.arrival is not None


__all__ = ["Call", "FakeTarget", "ask", "forward", "is_here", "label", "restored", "tensor"]
