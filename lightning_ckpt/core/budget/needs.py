"""A measured step, as the search for a plan wants it: what must be free, and who holds how much.

The peak is the largest of many sums, one for each segment of the step: the measured bytes there,
and what the blocks before hold. The backward goes through the blocks in the reverse order of the
forward, so the sums grow block by block. Where the order is another (parallel towers, a block that
is called twice) they are taken too large rather than too small.

Note: [Near]
A block that offloads holds its tensors while the block right after it computes, in forward until
the copy has ended and in backward since the copy is back, and does not when later ones do. So its
bytes have two parts: what it holds for all that come later, and what it holds more for the next.

Note: [Two that hold one]
What a block gave may be held by itself, as its result, and by the next one, as its input. When the
next one offloads it, it stays for the sake of the first, and is there twice when it is back. When
the first one offloads it and the next one does not, it is there twice once the first has it back.
Both go by the choices of two blocks in a row, and the search knows the one before.
"""

from collections import Counter
from collections.abc import Set
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_ckpt.core.budget.costs import Measurement, Option, next_recomputes, rise, spans
from lightning_ckpt.core.plan import Choice

_UNKNOWN = np.iinfo(np.int64).min  # nothing asked for it


class Beside(NamedTuple):
    """What a block does to the next one alone. Rows are positions, columns the block's choices.

    Attributes:
        near: bytes that it holds beside while the next one computes: Note: [Near].
        output: bytes of a result of its own, which stay if the next one offloads its inputs.
        result: bytes that it holds while the next one computes, unless that one offloads them.
        late: bytes that it holds in the segment right before its recompute.
    """

    near: NDArray[np.int64]
    output: NDArray[np.int64]
    result: NDArray[np.int64]
    late: NDArray[np.int64]


class Needs(NamedTuple):
    """What must stay free of bytes held by the blocks before, in the order of the first calls.
    Rows are positions in that order, columns the block's choices.

    Attributes:
        order: indices of the blocks.
        choices: by block, those that it can take.
        held: bytes that the block holds while later ones compute.
        beside: what it does to the next one.
        moves: whether it offloads inputs that the block before gave.
        seconds: what it computes again, and is waited for.
        own: bytes that must be free while it computes.
        before: the same, in the segment right before the recompute of the block before.
        far: the same, where the block before does not hold what it does for this one.
        anyway: by position, bytes that must be free whatever its block does; one row more.
    """

    order: list[int]
    choices: list[list[Choice]]
    held: NDArray[np.int64]
    beside: Beside
    moves: NDArray[np.bool_]
    seconds: NDArray[np.float64]
    own: NDArray[np.int64]
    before: NDArray[np.int64]
    far: NDArray[np.int64]
    anyway: NDArray[np.int64]


def needs_of(
    step: Measurement, choices: list[list[Choice]], without: Set[int] = frozenset()
) -> Needs:
    """The measured step, as the dynamic programme wants it.

    Args:
        step: what was measured.
        choices: by block, those that it can take.
        without: segments that ask for nothing.
    """
    first = list(dict.fromkeys(call.block for call in step.calls))
    order = first + [block for block in range(len(step.names)) if block not in set(first)]
    shape = len(order), max(map(len, choices))
    near, output, result, late, own, before, far = np.zeros((7, *shape), np.int64)
    needs = Needs(
        order,
        choices,
        np.full(shape, _UNKNOWN),
        Beside(np.full_like(near, _UNKNOWN), output, result, late),
        np.zeros(shape, np.bool_),
        np.zeros(shape),
        own,
        before,
        far,
        np.zeros(len(order) + 1, np.int64),
    )
    _Filling(step, needs).fill(without)
    # What was noted for the next block alone, or for nobody, is what it holds for all.
    held, near = needs.held, needs.beside.near
    held = np.where(held == _UNKNOWN, np.maximum(near, 0), held)
    near = np.maximum(np.maximum(near, held) - held, 0)
    return needs._replace(held=held, beside=needs.beside._replace(near=near))


class _Filling:
    """Goes through the segments and notes what each asks for."""

    def __init__(self, step: Measurement, needs: Needs) -> None:
        self._step = step
        self._needs = needs
        position = {block: index for index, block in enumerate(needs.order)}
        self._row = [position[call.block] for call in step.calls]
        self._pairs = self._find_pairs()
        self._followed = set(self._pairs.values())
        self._held = np.zeros(needs.held.shape, np.int64)  # in the segment that is looked at

    def fill(self, without: Set[int]) -> None:
        changes, owners = self._changes()
        comes = next_recomputes(self._step)
        for index, segment in enumerate(self._step.segments):
            for call, column, num_bytes in changes[index]:
                self._held[self._row[call], column] += num_bytes
            if index in without:
                continue
            owner = owners[index] if segment.call is None else segment.call
            if owner is None:
                self._ask(self._last() + 1, segment.peak)
            else:
                self._ask_for(owner, index)
            if index in comes:
                self._ask_late(comes[index], segment.peak, owner)

    def _changes(self) -> tuple[list[list[tuple[int, int, int]]], list[int | None]]:
        """By segment: who begins to hold how much more or less, (call, column, bytes); and whose
        backward it is."""
        step, needs = self._step, self._needs
        changes: list[list[tuple[int, int, int]]] = [[] for _ in range(len(step.segments) + 1)]
        owners: list[int | None] = [None] * len(step.segments)
        known = spans(step)
        for index, call in enumerate(step.calls):
            row, span = self._row[index], known.get(index)
            for column, choice in enumerate(needs.choices[call.block]):
                option = call.options[choice]
                needs.seconds[row, column] += option.seconds
                apart, doubled = self._apart(index, option, column)
                for at, num_bytes in span.changes(apart, doubled) if span else ():
                    changes[at].append((index, column, num_bytes))
            if span:
                owners[span.ends : span.done] = [index] * (span.done - span.ends)
        return changes, owners

    def _apart(self, index: int, option: Option, column: int) -> tuple[Option, int]:
        """The option without what goes by two choices, which is noted; and what others may hold of
        its inputs, if they are not the block before. Note: [Two that hold one]."""
        needs, call, row = self._needs, self._step.calls[index], self._row[index]
        if index in self._followed:
            needs.beside.output[row, column] = option.output
            needs.beside.result[row, column] = option.result
            option = option._replace(result=0)
        if not option.moved:
            return option, 0
        needs.moves[row, column] = index in self._pairs
        others = (self._step.calls[i] for i in call.producers if i != self._pairs.get(index))
        return option, sum(max(c.options[a].output for a in needs.choices[c.block]) for c in others)

    def _find_pairs(self) -> dict[int, int]:
        """By call that may offload its inputs, the one that gave them, where that is the only call
        of the block before."""
        calls, choices = self._step.calls, self._needs.choices
        num_calls = Counter(call.block for call in calls)
        return {
            index: producer
            for index, call in enumerate(calls)
            for producer in call.producers
            if self._row[producer] + 1 == self._row[index]
            and num_calls[call.block] == num_calls[calls[producer].block] == 1
            and any(call.options[choice].moved for choice in choices[call.block])
        }

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

    def _ask_far(self, position: int, column: int, num_bytes: int) -> None:
        """The same, while the block before it holds what it does for later ones."""
        self._needs.far[position, column] = max(self._needs.far[position, column], num_bytes)
        held = self._needs.held[:position]
        np.maximum(held, self._held[:position], out=held)

    def _note(self, position: int) -> None:
        """Note what the blocks before that position hold now."""
        held, near = self._needs.held, self._needs.beside.near
        now, last = self._held, position - 1
        if last >= 0:
            np.maximum(held[:last], now[:last], out=held[:last])
            np.maximum(near[last], now[last], out=near[last])

    def _ask_for(self, call: int, index: int) -> None:
        """What a segment of the call, or one in its backward, asks for."""
        segment, row = self._step.segments[index], self._row[call]
        options = self._step.calls[call].options
        chosen = [options[choice] for choice in self._needs.choices[self._step.calls[call].block]]
        more = [0 if segment.call is None else rise(segment, option) for option in chosen]
        asked = [column for column, each in enumerate(more) if each is not None]
        needed = segment.peak + np.array([more[column] for column in asked], np.int64)
        if not asked:
            return
        last = self._last(without=row)
        if last > row:  # it holds something meanwhile, so its position is the one to ask at
            self._ask(last + 1, int(needed.max()))
            return
        own = self._needs.own[row]
        own[asked] = np.maximum(own[asked], needed + self._held[row, asked])
        self._note(row)

    def _ask_late(self, call: int, peak: int, owner: int | None) -> None:
        """What the segment right before the recompute of the call asks for, if that holds more."""
        row, options = self._row[call], self._step.calls[call].options
        lates = [options[a].late for a in self._needs.choices[self._step.calls[call].block]]
        if not any(lates):
            return
        next_to = owner is not None and self._row[owner] == row + 1
        last = self._last(without=row + 1 if next_to else None)
        if last > row:
            self._ask(last + 1, peak + max(lates))
        elif next_to:
            before = self._needs.before[row + 1]
            np.maximum(before, peak + self._held[row + 1], out=before)
            late = self._needs.beside.late[row, : len(lates)]
            np.maximum(late, lates, out=late)
        else:  # what is asked there has not yet its own bytes in
            for column, more in enumerate(lates):
                self._ask_far(row, column, peak + more + int(self._held[row, column]))
