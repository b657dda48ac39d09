"""The dynamic programme behind `budget.fastest`.

What is to be chosen is one action for each block. The peak is the largest of many sums, one for
each segment of the step: the measured bytes there, and what the blocks before hold. The backward
goes through the blocks in the reverse order of the forward, so the sums grow block by block, and
after each block the front of bytes held against seconds lost is all that has to be known. (Torch's
`sac_ilp` gives a like problem to a solver; a solver is slow on equal blocks, through their
symmetry.) Where the order is another (parallel towers, a block that is called twice) the sums are
taken too large rather than too small.

Note: [Near]
A block that offloads holds its tensors while the block right after it computes, in forward until
the copy has ended and in backward since the copy is back, and does not when later ones do. So its
bytes have two parts: what it holds for all that come later, and what it holds more for the next.
There is a front for each value of the second part, which for alike blocks are three.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_ckpt.core.budget.costs import Measurement, next_recomputes, rise, spans
from lightning_ckpt.core.plan import Choice

_NUM_POINTS = 2048  # of all fronts; more are thinned out, which loses next to nothing
_UNKNOWN = np.iinfo(np.int64).min  # nothing asked for it


class Needs(NamedTuple):
    """What must stay free of bytes held by the blocks before, in the order of the first calls.
    Rows are positions in that order, columns the block's choices.

    Attributes:
        order: indices of the blocks.
        choices: by block, those that it can take.
        held: bytes that the block holds while later ones compute.
        near: bytes that it holds beside while the next one does.
        seconds: what it computes again, and is waited for.
        own: bytes that must be free while it computes.
        far: the same, where the block before does not hold `near`.
        anyway: by position, bytes that must be free whatever its block does; one row more.
    """

    order: list[int]
    choices: list[list[Choice]]
    held: NDArray[np.int64]
    near: NDArray[np.int64]
    seconds: NDArray[np.float64]
    own: NDArray[np.int64]
    far: NDArray[np.int64]
    anyway: NDArray[np.int64]


def needs_of(step: Measurement, choices: list[list[Choice]]) -> Needs:
    """The measured step, as the dynamic programme wants it.

    Args:
        step: what was measured.
        choices: by block, those that it can take.
    """
    first = list(dict.fromkeys(call.block for call in step.calls))
    order = first + [block for block in range(len(step.names)) if block not in set(first)]
    shape = len(order), max(map(len, choices))
    needs = Needs(
        order,
        choices,
        np.full(shape, _UNKNOWN),
        np.full(shape, _UNKNOWN),
        np.zeros(shape),
        np.zeros(shape, np.int64),
        np.zeros(shape, np.int64),
        np.zeros(len(order) + 1, np.int64),
    )
    _Filling(step, needs).fill()
    # What was noted for the next block alone, or for nobody, is what it holds for all.
    held = np.where(needs.held == _UNKNOWN, np.maximum(needs.near, 0), needs.held)
    near = np.maximum(np.maximum(needs.near, held) - held, 0)
    return needs._replace(held=held, near=near)


class _Filling:
    """Goes through the segments and notes what each asks for."""

    def __init__(self, step: Measurement, needs: Needs) -> None:
        self._step = step
        self._needs = needs
        position = {block: index for index, block in enumerate(needs.order)}
        self._row = [position[call.block] for call in step.calls]
        self._held = np.zeros(needs.held.shape, np.int64)  # in the segment that is looked at

    def fill(self) -> None:
        changes, owners = self._changes()
        comes = next_recomputes(self._step)
        for index, segment in enumerate(self._step.segments):
            for call, column, num_bytes in changes[index]:
                self._held[self._row[call], column] += num_bytes
            owner = owners[index] if segment.call is None else segment.call
            if owner is None:
                self._ask(self._last() + 1, segment.peak)
            else:
                self._ask_for(owner, index)
            if index in comes:
                self._ask_late(comes[index], segment.peak, owner)

    def _changes(self) -> tuple[list[list[tuple[int, int, int]]], list[int | None]]:
        """By segment: who begins to hold how much more or less, (call, column, bytes); and whose
        backward it is, if that makes a difference there."""
        step, needs = self._step, self._needs
        changes: list[list[tuple[int, int, int]]] = [[] for _ in range(len(step.segments) + 1)]
        owners: list[int | None] = [None] * len(step.segments)
        known = spans(step)
        for index, call in enumerate(step.calls):
            for column, choice in enumerate(needs.choices[call.block]):
                option = call.options[choice]
                needs.seconds[self._row[index], column] += option.seconds
                for at, num_bytes in known[index].changes(option) if index in known else ():
                    changes[at].append((index, column, num_bytes))
                if option.twice and index in known:
                    span = known[index]
                    owners[span.ends : span.done] = [index] * (span.done - span.ends)
        return changes, owners

    def _last(self, without: int | None = None) -> int:
        """The last position whose block may hold something now."""
        holding: NDArray[np.bool_] = np.asarray(self._held.any(axis=1))
        if without is not None:
            holding[without] = False
        found = np.flatnonzero(holding)
        return int(found[-1]) if len(found) else -1

    def _ask(self, position: int, num_bytes: int) -> None:
        """So much must be free there, whatever the block does."""
        self._needs.anyway[position] = max(self._needs.anyway[position], num_bytes)
        self._note(position)

    def _ask_own(self, position: int, column: int, num_bytes: int) -> None:
        """So much must be free there for that choice."""
        self._needs.own[position, column] = max(self._needs.own[position, column], num_bytes)
        self._note(position)

    def _ask_far(self, position: int, column: int, num_bytes: int) -> None:
        """The same, while the block before it holds what it does for later ones."""
        self._needs.far[position, column] = max(self._needs.far[position, column], num_bytes)
        held = self._needs.held[:position]
        np.maximum(held, self._held[:position], out=held)

    def _note(self, position: int) -> None:
        """Note what the blocks before that position hold now."""
        held, near, now, last = self._needs.held, self._needs.near, self._held, position - 1
        if last >= 0:
            np.maximum(held[:last], now[:last], out=held[:last])
            np.maximum(near[last], now[last], out=near[last])

    def _ask_for(self, call: int, index: int) -> None:
        """What a segment of the call, or one in its backward, asks for."""
        segment, row = self._step.segments[index], self._row[call]
        last = self._last(without=row)
        block, options = self._step.calls[call][:2]
        for column, choice in enumerate(self._needs.choices[block]):
            more = 0 if segment.call is None else rise(segment, options[choice])
            if more is None:
                continue
            if last < row:
                self._ask_own(row, column, segment.peak + more + int(self._held[row, column]))
            else:  # a later block holds something meanwhile, so its position is the one to ask at
                self._ask(last + 1, segment.peak + more)

    def _ask_late(self, call: int, peak: int, owner: int | None) -> None:
        """What the segment right before the recompute of the call asks for, if that holds more."""
        held_by_owner = 0 if owner is None else int(self._held[self._row[owner]].max())
        last, row = self._last(without=None if owner is None else self._row[owner]), self._row[call]
        block, options = self._step.calls[call][:2]
        for column, choice in enumerate(self._needs.choices[block]):
            late = options[choice].late
            need = peak + late + held_by_owner
            if late and last == row:  # what is asked there has not yet its own bytes in
                self._ask_far(row, column, need + int(self._held[row, column]))
            elif late:
                self._ask(last + 1, need)


class _Layer(NamedTuple):
    """The fronts after a block: how each of their points was reached."""

    parents: NDArray[np.int64]
    choices: NDArray[np.int64]  # indices of the block's choices


class _Points(NamedTuple):
    """Ways to come to a place: bytes held, seconds lost, and what the last block holds beside."""

    held: NDArray[np.int64]
    seconds: NDArray[np.float64]
    near: NDArray[np.int64]


def search(needs: Needs, budget: int) -> list[Choice] | None:
    """The dynamic programme; None if nothing fits."""
    zero = np.zeros(1, np.int64)
    points = _Points(zero, np.zeros(1), zero)
    layers: list[_Layer] = []
    for index, block in enumerate(needs.order):
        parts, both = [], points.held + points.near
        for number in range(len(needs.choices[block])):
            room = budget - max(needs.anyway[index], needs.own[index, number])
            far = budget - needs.far[index, number]
            fits = np.flatnonzero((both <= room) & (points.held <= far))
            now = points.held[fits] + needs.held[index, number]
            lost = points.seconds[fits] + needs.seconds[index, number]
            near = np.full(len(fits), needs.near[index, number])
            parts.append((now, lost, near, fits, np.full(len(fits), number)))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        found = _fronts(columns[0], columns[1], columns[2])
        if not len(found):
            return None
        points = _Points(*(column[found] for column in columns[:3]))
        layers.append(_Layer(columns[3][found], columns[4][found]))
    fits = np.flatnonzero(points.held + points.near <= budget - needs.anyway[-1])
    if not len(fits):
        return None
    return _backtrack(needs, layers, int(fits[np.argmin(points.seconds[fits])]))


def _fronts(
    held: NDArray[np.int64], seconds: NDArray[np.float64], near: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Indices of the points of the front of each kind: Note: [Near]."""
    kinds = np.unique(near)
    if len(kinds) < 2:
        return _front(held, seconds, _NUM_POINTS)
    fronts = []
    for kind in kinds:
        same = np.flatnonzero(near == kind)
        fronts.append(same[_front(held[same], seconds[same], _NUM_POINTS // len(kinds))])
    return np.concatenate(fronts)


def _front(held: NDArray[np.int64], seconds: NDArray[np.float64], most: int) -> NDArray[np.int64]:
    """Indices of the points that no other beats in both, by bytes held; `most` of them, and one."""
    order = np.argsort(held, kind="stable")  # fast, since it is made of parts that are in order
    best = np.minimum.accumulate(seconds[order])
    is_better = np.ones(len(order), bool)
    is_better[1:] = best[1:] < best[:-1]
    front = order[is_better]
    is_last = np.ones(len(front), bool)  # of those that hold the same
    is_last[:-1] = held[front[1:]] != held[front[:-1]]
    front = front[is_last]
    if len(front) <= most:
        return front
    # The fastest of each range of bytes, and the one that holds least.
    ranges = ((held[front] - held[front[0]]) * most) // (np.ptp(held[front]) + 1)
    is_last = np.append(ranges[1:] != ranges[:-1], True)
    is_last[0] = True
    return front[is_last]


def _backtrack(needs: Needs, layers: list[_Layer], point: int) -> list[Choice]:
    chosen: dict[int, Choice] = {}
    for block, layer in zip(reversed(needs.order), reversed(layers), strict=True):
        chosen[block] = needs.choices[block][int(layer.choices[point])]
        point = int(layer.parents[point])
    return [chosen[block] for block in range(len(chosen))]
