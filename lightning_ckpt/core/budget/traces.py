"""What was seen of one call of a block: its forward, and its recompute."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, get_args

import torch
from torch import Tensor

from lightning_ckpt.core._torch import CASTS
from lightning_ckpt.core.budget.clock import Clock, Overhead
from lightning_ckpt.core.budget.costs import Option
from lightning_ckpt.core.budget.inputs import InputWatch
from lightning_ckpt.core.budget.saved_results import SavedResults, is_plain
from lightning_ckpt.core.budget.waiting import Movable
from lightning_ckpt.core.plan import Choice
from lightning_ckpt.core.recompute import Phase
from lightning_ckpt.core.saving import Saving


class Segments(Protocol):
    """The step's segments, as they are recorded."""

    def index(self) -> int:
        """Of the segment that lasts now."""

    def cut_soon(self) -> int:
        """Begin another one at the next operation; returns its index."""


class CallTrace:
    """One call of a block, from its forward to the end of its recompute.

    Args:
        block: its index.
        clock: tells times.
        segments: tells of the step's segments, and begins another where an output of the call dies.
        number: the call's.
        inputs: follows what it saves.
    """

    def __init__(
        self, block: int, clock: Clock, segments: Segments, number: int, inputs: InputWatch
    ) -> None:
        self.block = block
        self._number = number
        self._inputs = inputs
        self._own: set[int] = set()  # `id` of the storages that the computation made
        self._others: dict[int, int] = {}  # bytes of what it read beside, by `id`
        self._has_wrapped = False  # tensors that an offload does not move
        self._made_bytes = self._result_bytes = 0  # that could be moved
        self._clock = clock
        self._segments = segments
        self._made: dict[Phase, list[list[_Made]]] = {"forward": [], "recompute": []}
        self._outputs: list[int] = []  # operations whose results outlived the forward
        self._own_outputs = self._has_late_end = False
        self._late = self._doubled = 0
        self._phase: Phase = "forward"
        self._start = 0
        self._levels: dict[Phase, list[int]] = {"forward": [], "recompute": []}  # above the start
        self._held = 0
        self._forward_end = 0
        self._times: tuple[Any, Any] | None = None
        self._begun: Any = None
        self._saved = {saving: SavedResults(saving) for saving in get_args(Saving)}

    def begin(self, phase: Phase, start: int) -> None:
        """A computation begins, with so many live bytes."""
        self._phase, self._start = phase, start
        self._levels[phase].clear()  # of an earlier recompute of the same call
        self._made[phase].clear()
        self._own.clear()
        self._others.clear()
        self._own_outputs = phase == "recompute" and self._held_by_others()
        for saved in self._saved.values():
            saved.begin(phase)
        self._begun = self._clock.mark()

    def add(
        self, operation: Any, given: Any, result: Any, times: tuple[Any, Any], live: int
    ) -> None:
        """An operation was done with what was given, and so many bytes are live."""
        level = live - self._start
        self._levels[self._phase].append(level)
        fresh = _fresh(given, result)
        # Autocast keeps its copies of weights until it ends, whoever else lets them go.
        is_copy = operation in CASTS and any(map(self._is_state, _flat(given)))
        made = [_Made(s, self._segments, self._inputs, not is_copy) for s in fresh]
        self._made[self._phase].append(made)
        if self._phase == "recompute":
            self._note_others(given)
        self._own.update(each.key for each in made)
        for saved in self._saved.values():
            saved.add(operation, result, times, level)

    def _is_state(self, tensor: Tensor) -> bool:
        return id(tensor.untyped_storage()) in self._inputs.state

    def _note_others(self, given: Any) -> None:
        """An operation of a kept block may save what it reads from elsewhere, too."""
        for tensor in _flat(given):
            storage = self._inputs.movable(tensor)
            if storage is None or id(storage) in self._own:
                continue
            if not self._inputs.knows(self._number, storage):
                self._others[id(storage)] = storage.nbytes()

    def meet_wrapped(self) -> None:
        """There was an operation on tensors around tensors, which an offload does not move."""
        self._has_wrapped = True

    def spoil(self, tensors: Iterable[Tensor]) -> None:
        """These will be changed in place."""
        if self._phase == "forward":
            storages = {id(tensor.untyped_storage()) for tensor in tensors if is_plain(tensor)}
            for saved in self._saved.values():
                saved.spoil(storages)

    def end(self, live: int) -> None:
        """The computation is over, and so many bytes are live."""
        if self._phase == "forward":
            self._forward_end = live - self._start
            for index, each in enumerate(self._made["forward"]):
                outlived = [made for made in each if made.died is None]
                for made in outlived:
                    made.is_output = True
                self._outputs += [index] if outlived else []
                self._inputs.gave(self._number, (made.key for made in outlived))
        else:
            self._times = (self._begun, self._clock.mark())
            results = self._again() if self._own_outputs else []
            doubled = sum(made.num_bytes for made in results)
            self._held = max(0, live - self._start - doubled)
            self._late = doubled if self._has_late_end else 0
            self._doubled = doubled
            alive = [m for each in self._made["recompute"] for m in each if m.can_move()]
            self._made_bytes = sum(m.num_bytes for m in alive if m not in results)
            self._result_bytes = sum(m.num_bytes for m in alive if m in results)

    def _held_by_others(self) -> bool:
        """Whether the forward's results are there until the last segment before this recompute."""
        last = self._segments.index() - 1
        ends = [m.died for index in self._outputs for m in self._made["forward"][index]]
        self._has_late_end = any(end is not None and end <= last for end in ends)
        return all(end is None or end >= last for end in ends)

    def _again(self) -> list["_Made"]:
        """Results that the recompute made once more and holds: a kept block would hold those that
        its forward gave, and they are counted already."""
        again = self._made["recompute"]
        there = [made for index in self._outputs if index < len(again) for made in again[index]]
        return [made for made in there if made.died is None]

    def movable(self, returns: int) -> Movable | None:
        """What could wait elsewhere until that segment; None: it is not known."""
        if self._times is None or self._has_wrapped:
            return None
        return Movable(
            self._inputs.saved(self._number, returns),
            self._made_bytes,
            self._result_bytes,
            sum(self._others.values()),
        )

    def made_sizes(self) -> list[int]:
        """Bytes of each storage that its forward made."""
        return [made.num_bytes for each in self._made["forward"] for made in each]

    def times(self) -> tuple[Any, Any]:
        """When its recompute began and ended."""
        return self._times or (self._begun, self._begun)

    def options(self, overhead: Overhead) -> dict[Choice, Option]:
        """What could be done with this call; after `Clock.synchronize`. `overhead` is lost where
        it is partly recomputed."""
        if self._times is None:  # backward never came here: it costs nothing, and would hold much
            return {"recompute": Option(0, 0, 0, 0.0), "keep": self._all_kept()}
        seconds = self._clock.seconds(*self._times)
        options: dict[Choice, Option] = {
            "recompute": Option(0, 0, 0, seconds),
            "keep": Option(self._held, self._kept_forward(), None, 0.0, self._late, self._doubled),
        }
        for saving, saved in self._saved.items():
            if saved.is_possible:
                options[saving] = saved.option(self._levels, seconds, overhead, self._clock)
        return options

    def _all_kept(self) -> Option:
        """Without a recompute it is not known what backward would need: it may be all that the
        forward made, for as long as its graph is there."""
        made = sum(self.made_sizes())
        return Option(made, 0, None, 0.0)  # the segment after the forward asks for as much

    def _kept_forward(self) -> int:
        """How much higher the forward's peak is if its activations are kept: it rises as the
        recompute did, and then by all that the recompute was spared."""
        forward, recompute = self._levels["forward"], self._levels["recompute"]
        last = (recompute[-1] if recompute else 0) + self._spared_bytes()
        peak = max([0, *recompute, self._held + max(0, self._forward_end), last])
        return max(0, peak - max([0, *forward, self._forward_end]))

    def _spared_bytes(self) -> int:
        spared = self._made["forward"][len(self._levels["recompute"]) :]
        return sum(made.num_bytes for each in spared for made in each)


class _Made:
    """A storage that an operation gave, and from which segment on it was dead."""

    def __init__(
        self,
        storage: torch.UntypedStorage,
        segments: Segments,
        inputs: InputWatch,
        is_movable: bool,
    ) -> None:
        self.num_bytes = storage.nbytes()
        self.key = id(storage)
        self._is_movable = is_movable and self.num_bytes >= inputs.min_bytes
        self.is_output = False
        self.died: int | None = None

        def died(_: Any) -> None:
            self.died = segments.cut_soon() if self.is_output else segments.index()
            if self.is_output:
                inputs.died(self.key)

        self._ref = weakref.ref(storage, died)

    def can_move(self) -> bool:
        """Whether it is there, and an offload would move it."""
        return self.died is None and self._is_movable


def _fresh(given: Any, result: Any) -> list[torch.UntypedStorage]:
    """The storages in `result` that are not among those given."""
    known = {id(tensor.untyped_storage()) for tensor in _flat(given)}
    made = {id(s): s for s in (tensor.untyped_storage() for tensor in _flat(result))}
    return [storage for key, storage in made.items() if key not in known]


def _flat(values: Any) -> Iterator[Tensor]:
    if isinstance(values, (list, tuple)):
        for value in values:
            yield from _flat(value)
    elif is_plain(values):
        yield values
