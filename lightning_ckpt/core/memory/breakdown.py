"""What the bytes of a step are: parameters, gradients, states, buffers, activations, the rest.

A step is a list of events: a storage came (+bytes) or went (-bytes), in order. What a storage was
is known at the step's end only (a gradient is not named before backward has left it), so the
events are kept, and read once.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from lightning_ckpt.core.memory.holders import storages_of, tensors_by_kind

KINDS = ("parameters", "gradients", "optimizer_states", "buffers")
PARTS = (*KINDS, "activations", "other")


class Piece(Protocol):
    """One storage. `kind` is one of `KINDS`, None where nothing named it."""

    kind: str | None


Event = tuple[Any, int, int]  # (Piece, bytes that came or went, `time.time_ns` of it)


@dataclass
class Marks:
    """Where in the events forward ended and backward ended; several where a step has several."""

    num_before: int = 0  # the first events are what was there when the step began
    forward_ends: list[int] = field(default_factory=list)
    backward_ends: list[int] = field(default_factory=list)

    def is_before(self, index: int) -> bool:
        """Whether the event is of what was there when the step began."""
        return index < self.num_before

    def is_forward(self, index: int) -> bool:
        """Whether a forward, to which a backward belongs, was on at this event."""
        begun = bisect_right(self.forward_ends, index)
        ended = bisect_right(self.backward_ends, index)
        return not self.is_before(index) and begun == ended and begun < len(self.forward_ends)


@dataclass(frozen=True)
class StepFigures:
    """Bytes of one step.

    Attributes:
        peak: the most that was live at once.
        parts: what was live at the peak, by `PARTS`; they add up to it. "activations" are what a
            forward made and what goes in the step, as far as it is held then; "other" is the rest:
            the batch, and what backward, the recompute and the optimizer make for a moment.
        activations: what of them was held when forward ended, None if no backward began.
    """

    peak: int
    parts: dict[str, int]
    activations: int | None = None


def read_events(events: Sequence[Event], marks: Marks) -> StepFigures:
    """The figures of a step that is over."""
    peak, index = _find_peak(events)
    made_in_forward = _made_in_forward(events, marks)
    parts = dict.fromkeys(PARTS, 0)
    for piece, num_bytes, _ in events[: index + 1]:
        parts[_part(piece, made_in_forward)] += num_bytes
    held = [_held(events[:end], made_in_forward) for end in marks.forward_ends]
    return StepFigures(peak, parts, max(held, default=None))


def held_now(model: nn.Module, optimizers: Iterable[Optimizer], live_bytes: int) -> dict[str, int]:
    """What holds `live_bytes` at this moment, by `KINDS`; the rest is under "activations and
    other"."""
    held = dict.fromkeys(KINDS, 0)
    seen: set[int] = set()
    for kind, tensor in tensors_by_kind(model, optimizers):
        for storage in storages_of(tensor):
            if storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                held[kind] += storage.nbytes()
    return {**held, "activations and other": live_bytes - sum(held.values())}


def _find_peak(events: Iterable[Event]) -> tuple[int, int]:
    live = peak = 0
    at = -1
    for index, (_, num_bytes, _) in enumerate(events):
        live += num_bytes
        if live > peak:
            peak, at = live, index
    return peak, at


def _made_in_forward(events: Iterable[Event], marks: Marks) -> set[int]:
    """`id`s of the pieces that came while a forward was on, and are gone when the step is over:
    what outlives it (DDP's buckets, what the user keeps) is not held for backward."""
    left: dict[int, int] = {}  # bytes
    made: set[int] = set()
    for index, (piece, num_bytes, _) in enumerate(events):
        if id(piece) not in left and marks.is_forward(index):
            made.add(id(piece))
        left[id(piece)] = left.get(id(piece), 0) + num_bytes
    return {key for key in made if left[key] == 0}


def _part(piece: Piece, made_in_forward: set[int]) -> str:
    if piece.kind is not None:
        return piece.kind
    return "activations" if id(piece) in made_in_forward else "other"


def _held(events: Iterable[Event], made_in_forward: set[int]) -> int:
    return sum(
        num_bytes
        for piece, num_bytes, _ in events
        if piece.kind is None and id(piece) in made_in_forward
    )
