"""The dynamic programme behind `budget.fastest`.

What is to be chosen is one action for each block. After each block the front of bytes held against
seconds lost is all that has to be known (`needs`), one for each thing that the block may do to the
next, which for alike blocks are a few. (Torch's `sac_ilp` gives a like problem to a solver; a
solver is slow on equal blocks, through their symmetry.)
"""

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


def search(needs: Needs, budget: int) -> list[Choice] | None:
    """The dynamic programme; None if nothing fits."""
    zero = np.zeros(1, np.int64)
    points = _Points(zero, np.zeros(1), zero)
    layers: list[_Layer] = []
    for index in range(len(needs.order)):
        points, layer = _with_block(needs, budget, index, points)
        if not len(points.held):
            return None
        layers.append(layer)
    near = needs.beside.near[-1, points.last]
    fits = np.flatnonzero(points.held + near <= budget - needs.anyway[-1])
    if not len(fits):
        return None
    return _backtrack(needs, layers, int(fits[np.argmin(points.seconds[fits])]))


def _with_block(needs: Needs, budget: int, index: int, points: _Points) -> tuple[_Points, _Layer]:
    """The fronts after the block at that position."""
    before = _of_last(needs, index, points.last)
    near = points.held + before.near
    kinds = _kinds(needs, index)
    parts: dict[int, list[_Part]] = {kind: [] for kind in kinds}
    is_free = near <= budget - needs.anyway[index]
    for number in range(len(needs.choices[needs.order[index]])):
        moves = needs.moves[index, number]
        more = before.output if moves else before.result
        fits = is_free & (near + more <= budget - needs.own[index, number])
        if before.late.any():
            fits &= near + more + before.late <= budget - needs.before[index, number]
        held = points.held + before.output if moves else points.held
        if needs.far[index, number]:
            fits &= held <= budget - needs.far[index, number]
        found = np.flatnonzero(fits)
        now = held[found] + needs.held[index, number]
        lost = points.seconds[found] + needs.seconds[index, number]
        parts[kinds[number]].append((now, lost, found, np.full(len(found), number)))
    return _fronts(parts)


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
