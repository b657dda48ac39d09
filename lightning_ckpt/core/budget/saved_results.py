"""What a partly recomputed call of a block would keep, and what that would spare it."""

import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from lightning_ckpt.core.budget.clock import Clock, Overhead
from lightning_ckpt.core.budget.costs import Option
from lightning_ckpt.core.recompute import Phase
from lightning_ckpt.core.saving import SAVED, Saving


class _Result:
    """A storage that a dear operation gave in the forward."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.is_dropped = False  # nothing holds it any more
        self.is_extra = False  # nothing held it when the recompute began: it would be held for that
        self.ref: Any = None


class SavedResults:
    """What a partly recomputed call would keep, and what that would spare its recompute."""

    def __init__(self, saving: Saving) -> None:
        self._operations = SAVED[saving]
        self._phase: Phase = "forward"
        self._results: list[list[_Result]] = []  # of each operation, in the order of the forward
        self._alive: set[int] = set()  # storages, by `id`
        self._more = 0  # bytes that would be live now beside those that are
        self._held = 0
        self._peaks: dict[Phase, int] = {"forward": 0, "recompute": 0}
        self._times: list[tuple[Any, Any]] = []
        self._is_spoiled = False

    def begin(self, phase: Phase) -> None:
        self._phase = phase
        if phase == "recompute":
            for result in self._each():
                result.is_extra = result.is_dropped
            self._held = self._more = sum(r.num_bytes for r in self._each() if r.is_extra)
            self._peaks["recompute"] = self._held
            self._times.clear()

    def add(self, operation: Any, result: Any, times: tuple[Any, Any], level: int) -> None:
        if operation in self._operations:
            if self._phase == "forward":
                self._keep(result)
            else:
                self._take(times)
        self._peaks[self._phase] = max(self._peaks[self._phase], level + self._more)

    def spoil(self, storages: set[int]) -> None:
        self._is_spoiled |= not storages.isdisjoint(self._alive)

    @property
    def is_possible(self) -> bool:
        """Whether there is anything to keep, and nothing of it was changed in place."""
        return bool(self._results) and not self._is_spoiled

    def option(
        self, levels: dict[Phase, list[int]], seconds: float, overhead: Overhead, clock: Clock
    ) -> Option:
        """What it would mean for the call."""
        spared = sum(clock.seconds(*times) for times in self._times)
        lost = overhead.operation * sum(map(len, levels.values()))
        lost += overhead.kept * (len(self._results) + len(self._times))
        return Option(
            held=self._held,
            forward=max(0, self._peaks["forward"] - max([0, *levels["forward"]])),
            recompute=max(0, self._peaks["recompute"] - max([0, *levels["recompute"]])),
            seconds=max(0.0, seconds - spared) + lost,
            output=sum(result.num_bytes for result in self._each() if not result.is_extra),
        )

    def _each(self) -> Iterator[_Result]:
        return (result for group in self._results for result in group)

    def _keep(self, given: Any) -> None:
        group: list[_Result] = []
        for tensor in given if isinstance(given, (tuple, list)) else [given]:
            if is_plain(tensor) and id(tensor.untyped_storage()) not in self._alive:
                storage = tensor.untyped_storage()
                self._alive.add(id(storage))
                group.append(self._result(storage))
        self._results.append(group)

    def _result(self, storage: torch.UntypedStorage) -> _Result:
        result, key = _Result(storage.nbytes()), id(storage)

        def dropped(_: Any) -> None:
            result.is_dropped = True
            self._alive.discard(key)  # another may get the same `id`
            if self._phase == "forward":
                self._more += result.num_bytes

        result.ref = weakref.ref(storage, dropped)
        return result

    def _take(self, times: tuple[Any, Any]) -> None:
        if len(self._times) < len(self._results):
            group = self._results[len(self._times)]
            self._more -= sum(result.num_bytes for result in group if result.is_extra)
        self._times.append(times)


def is_plain(tensor: Any) -> bool:
    """Whether it is a tensor with one storage of its own."""
    return isinstance(tensor, Tensor) and tensor.layout == torch.strided
