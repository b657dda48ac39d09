"""The dynamic programme behind `budget.fastest`.

What is to be chosen is one action for each block. After each block the front of bytes held against
seconds lost is all that has to be known (`needs`), one for each thing that the block may do to the
next, which for alike blocks are a few. The fronts tell, too, how to come to the second fastest plan
and all that follow, as A* does (Hart, Nilsson, Raphael, 1968). (Torch's `sac_ilp` gives a like
problem to a solver; a solver is slow on equal blocks, through their symmetry.)
"""

from collections.abc import Iterator
from heapq import heappop, heappush
from itertools import count
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lightning_ckpt.core.budget.needs import Beside, Needs
from lightning_ckpt.core.plan import Choice

_NUM_POINTS = 2048  # of all fronts; more are thinned out, which loses next to nothing


class _Layer(NamedTuple):
    """The fronts after a block: how each of their points was reached."""

    parents: NDArray[np.int64]
    choices: NDArray[np.int64]  # indices of the block's choices


class _Points(NamedTuple):
    """Ways to come to a place: bytes held, seconds lost, and what the last block chose, or another
    of its choices that does the same to the next."""

    held: NDArray[np.int64]
    seconds: NDArray[np.float64]
    last: NDArray[np.int64]


# Held, seconds, parents, and choices of the points that a choice gives.
_Part: TypeAlias = tuple[
    NDArray[np.int64], NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]
]


def search(needs: Needs, budget: int) -> Iterator[list[Choice]]:
    """The plans within the budget: the fastest, and then all, the faster ones first."""
    zero = np.zeros(1, np.int64)
    points = [_Points(zero, np.zeros(1), zero)]  # before each block, and at the end
    layers: list[_Layer] = []
    for index in range(len(needs.order)):
        after, layer = _with_block(needs, budget, index, points[-1])
        if not len(after.held):
            return
        points.append(after)
        layers.append(layer)
    fits = np.flatnonzero(points[-1].held <= _most_at_end(needs, budget)[points[-1].last])
    if len(fits):
        yield _backtrack(needs, layers, int(fits[np.argmin(points[-1].seconds[fits])]))
        yield from _in_order(needs, budget, points)


def _in_order(needs: Needs, budget: int, points: list[_Points]) -> Iterator[list[Choice]]:
    """All plans, the faster ones first, from the last block to the first. How fast the blocks
    before can be, if they may hold so many bytes, is known by the points: so the search goes on
    where the whole will be fastest, and begins nothing that it cannot end."""
    tables: dict[tuple[int, int], tuple[NDArray[np.int64], NDArray[np.float64]]] = {}
    queue: list[tuple[float, int, int, int, float, tuple[int, ...]]] = []
    numbers = count(0, -1)  # of equals the one that came last goes on, or many would be begun

    def begin(index: int, column: int, most: int, behind: float, chosen: tuple[int, ...]) -> None:
        """The block there takes that choice, after which so many bytes may be held at most."""
        key = index, column
        if key not in tables:
            tables[key] = _with_choice(needs, budget, index, column, points[index])
        held, seconds = tables[key]
        if found := int(np.searchsorted(held, most, "right")):
            total = behind + float(seconds[found - 1])
            heappush(queue, (total, next(numbers), index, most, behind, (column, *chosen)))

    last = len(needs.order) - 1
    for column in range(len(needs.choices[needs.order[last]])):
        begin(last, column, int(_most_at_end(needs, budget)[column]), 0.0, ())
    while queue:
        _, _, index, most, behind, chosen = heappop(queue)
        if not index:
            columns = zip(needs.order, chosen, strict=True)
            found = {block: needs.choices[block][column] for block, column in columns}
            yield [found[block] for block in range(len(found))]
            continue
        num_before = len(needs.choices[needs.order[index - 1]])
        before = _of_last(needs, index, np.arange(num_before))
        free = np.minimum(
            _most_before(needs, budget, index, chosen[0], before),
            most - needs.held[index, chosen[0]] - _more(needs, index, chosen[0], before),
        )
        behind += float(needs.seconds[index, chosen[0]])
        for column in range(num_before):
            begin(index - 1, column, int(free[column]), behind, chosen)


def _with_choice(
    needs: Needs, budget: int, index: int, column: int, points: _Points
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Bytes held after a choice of the block at that position, in order, and the seconds lost by
    then if no more are held."""
    before = _of_last(needs, index, points.last)
    fits = points.held <= _most_before(needs, budget, index, column, before)
    held = (points.held + _more(needs, index, column, before))[fits] + needs.held[index, column]
    seconds = points.seconds[fits] + needs.seconds[index, column]
    order = np.argsort(held, kind="stable")
    return held[order], np.minimum.accumulate(seconds[order])


def _with_block(needs: Needs, budget: int, index: int, points: _Points) -> tuple[_Points, _Layer]:
    """The fronts after the block at that position."""
    before = _of_last(needs, index, points.last)
    kinds = _kinds(needs, index)
    parts: dict[int, list[_Part]] = {kind: [] for kind in kinds}
    for number in range(len(needs.choices[needs.order[index]])):
        found = np.flatnonzero(points.held <= _most_before(needs, budget, index, number, before))
        held = points.held + _more(needs, index, number, before)
        now = held[found] + needs.held[index, number]
        lost = points.seconds[found] + needs.seconds[index, number]
        parts[kinds[number]].append((now, lost, found, np.full(len(found), number)))
    return _fronts(parts)


def _most_before(
    needs: Needs, budget: int, index: int, number: int, before: Beside
) -> NDArray[np.int64]:
    """Bytes that the blocks before may hold, so that this choice fits; for each row of `before`."""
    free = budget - before.near - needs.anyway[index]
    more = before.output if needs.moves[index, number] else before.result
    free = np.minimum(free, budget - before.near - more - needs.own[index, number])
    if before.late.any():
        late = more + before.late
        free = np.minimum(free, budget - before.near - late - needs.before[index, number])
    if needs.far[index, number]:
        far = _more(needs, index, number, before) + needs.far[index, number]
        free = np.minimum(free, budget - far)
    return free


def _more(needs: Needs, index: int, number: int, before: Beside) -> NDArray[np.int64]:
    """Bytes that stay with the block before, since this one moves its inputs."""
    return before.output if needs.moves[index, number] else np.zeros_like(before.output)


def _most_at_end(needs: Needs, budget: int) -> NDArray[np.int64]:
    """Bytes that all blocks may hold, by the last one's choice."""
    return budget - needs.anyway[-1] - needs.beside.near[-1]


def _of_last(needs: Needs, index: int, last: NDArray[np.int64]) -> Beside:
    """What the block before that position does there, for each of its choices in `last`."""
    if not index:
        return Beside(*np.zeros((len(Beside._fields), len(last)), np.int64))
    return Beside(*(table[index - 1, last] for table in needs.beside))


def _kinds(needs: Needs, index: int) -> list[int]:
    """For each choice of a block, the first that does the same to the next one."""
    does = zip(*(table[index] for table in needs.beside), strict=True)
    first: dict[tuple[int, ...], int] = {}
    return [first.setdefault(tuple(map(int, each)), column) for column, each in enumerate(does)]


def _fronts(parts: dict[int, list[_Part]]) -> tuple[_Points, _Layer]:
    """The points of the front of each kind."""
    fronts = []
    most = _NUM_POINTS // len(parts)
    for kind, same in parts.items():
        held, seconds, parents, choices = (np.concatenate(c) for c in zip(*same, strict=True))
        front = _front(held, seconds, most)
        last = np.full(len(front), kind)
        fronts.append((held[front], seconds[front], last, parents[front], choices[front]))
    columns = [np.concatenate(column) for column in zip(*fronts, strict=True)]
    return _Points(*columns[:3]), _Layer(*columns[3:])


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
