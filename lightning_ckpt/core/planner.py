"""The dynamic programme behind `budget.fastest`.

What is to be chosen is one action for each block. The peak is the largest of many sums, one for
each segment of the step: the measured bytes there, and what the blocks before hold. The backward
goes through the blocks in the reverse order of the forward, so the sums grow block by block, and
after each block the front of bytes held against seconds lost is all that has to be known. (Torch's
`sac_ilp` gives a like problem to a solver; a solver is slow on equal blocks, through their
symmetry.) Where the order is another (parallel towers, a block that is called twice) the sums are
taken too large rather than too small.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_ckpt.core.costs import Call, Measurement, Segment, next_recomputes, rise, with_alive
from lightning_ckpt.core.plan import Action

_NUM_POINTS = 2048  # of a front; more are thinned out, which loses next to nothing


class Needs(NamedTuple):
    """What must stay free of bytes held by the blocks before, in the order of the first calls.

    Attributes:
        order: indices of the blocks.
        actions: by block, those that it can take.
        held: by block and action, bytes that it holds.
        seconds: by block and action, what it computes again.
        own: by block and action, bytes that must be free while it computes.
        anyway: by position in the order, bytes that must be free whatever its block does.
    """

    order: list[int]
    actions: list[list[Action]]
    held: list[dict[Action, int]]
    seconds: list[dict[Action, float]]
    own: list[dict[Action, int]]
    anyway: list[int]


def needs_of(step: Measurement, actions: list[list[Action]]) -> Needs:
    """The measured step, as the dynamic programme wants it.

    Args:
        step: what was measured.
        actions: by block, those that it can take.
    """
    first = list(dict.fromkeys(call.block for call in step.calls))
    order = first + [block for block in range(len(step.names)) if block not in set(first)]
    needs = Needs(
        order,
        actions,
        [dict.fromkeys(able, 0) for able in actions],
        [dict.fromkeys(able, 0.0) for able in actions],
        [dict.fromkeys(able, 0) for able in actions],
        [0] * (len(order) + 1),
    )
    for call in step.calls:
        for action in actions[call.block]:
            needs.seconds[call.block][action] += call.options[action].seconds
    position = {block: index for index, block in enumerate(order)}
    comes = next_recomputes(step)
    for index, (segment, alive) in enumerate(with_alive(step)):
        held = _held(step, actions, alive)
        _add_segment(needs, step, position, segment, held)
        if index in comes:
            _add_late(needs, position, segment, held, step.calls[comes[index]])
    return needs


def _add_late(
    needs: Needs,
    position: dict[int, int],
    segment: Segment,
    held: dict[int, dict[Action, int]],
    call: Call,
) -> None:
    """Note what `segment` asks for if the call that is recomputed right after it holds more."""
    last = max((position[block] for block, by in held.items() if any(by.values())), default=-1)
    for action in needs.actions[call.block]:
        if late := call.options[action].late:
            need = segment.peak + late
            if last == position[call.block]:  # what is asked there has not yet its own bytes in
                need += held[call.block][action]
                needs.own[call.block][action] = max(needs.own[call.block][action], need)
            else:
                needs.anyway[last + 1] = max(needs.anyway[last + 1], need)


def _add_segment(
    needs: Needs,
    step: Measurement,
    position: dict[int, int],
    segment: Segment,
    held: dict[int, dict[Action, int]],
) -> None:
    """Note what `segment` asks for, while blocks may hold what `held` says."""
    for block, by_action in held.items():
        for action, num_bytes in by_action.items():
            needs.held[block][action] = max(needs.held[block][action], num_bytes)
    call = None if segment.call is None else step.calls[segment.call]
    own = None if call is None else call.block
    others = (b for b, by_action in held.items() if b != own and any(by_action.values()))
    last = max((position[block] for block in others), default=-1)
    if call is None:
        needs.anyway[last + 1] = max(needs.anyway[last + 1], segment.peak)
        return
    for action in needs.actions[call.block]:
        more = rise(segment, call.options[action])
        if more is None:
            continue
        need = segment.peak + more + held.get(call.block, {}).get(action, 0)
        if last < position[call.block]:
            needs.own[call.block][action] = max(needs.own[call.block][action], need)
        else:  # a later block holds something meanwhile, so its position is the one to ask at
            needs.anyway[last + 1] = max(needs.anyway[last + 1], need)


def _held(
    step: Measurement, actions: list[list[Action]], alive: frozenset[int]
) -> dict[int, dict[Action, int]]:
    """What each block holds in the calls that are alive, by action."""
    held: dict[int, dict[Action, int]] = {}
    for index in alive:
        call = step.calls[index]
        block = held.setdefault(call.block, dict.fromkeys(actions[call.block], 0))
        for action in block:
            block[action] += call.options[action].held
    return held


class _Layer(NamedTuple):
    """The front after a block: how each of its points was reached."""

    parents: NDArray[np.int64]
    actions: NDArray[np.int64]  # indices of the block's actions


def search(needs: Needs, budget: int) -> list[Action] | None:
    """The dynamic programme; None if nothing fits."""
    held, seconds = np.zeros(1, np.int64), np.zeros(1)
    layers: list[_Layer] = []
    for index, block in enumerate(needs.order):
        parts = []
        for number, action in enumerate(needs.actions[block]):
            room = budget - max(needs.anyway[index], needs.own[block][action])
            fits = np.flatnonzero(held <= room)
            now = held[fits] + needs.held[block][action]
            lost = seconds[fits] + needs.seconds[block][action]
            parts.append((now, lost, fits, np.full(len(fits), number)))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        front = _front(columns[0], columns[1])
        if not len(front):
            return None
        held, seconds = columns[0][front], columns[1][front]
        layers.append(_Layer(columns[2][front], columns[3][front]))
    fits = np.flatnonzero(held <= budget - needs.anyway[-1])
    if not len(fits):
        return None
    return _backtrack(needs, layers, int(fits[np.argmin(seconds[fits])]))


def _front(held: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Indices of the points that no other beats in both, by bytes held."""
    order = np.lexsort((seconds, held))
    best = np.minimum.accumulate(seconds[order])
    is_better = np.ones(len(order), bool)
    is_better[1:] = best[1:] < best[:-1]
    front = order[is_better]
    if len(front) <= _NUM_POINTS:
        return front
    # The fastest of each range of bytes, and the one that holds least.
    ranges = ((held[front] - held[front[0]]) * _NUM_POINTS) // (np.ptp(held[front]) + 1)
    is_last = np.append(ranges[1:] != ranges[:-1], True)
    is_last[0] = True
    return front[is_last]


def _backtrack(needs: Needs, layers: list[_Layer], point: int) -> list[Action]:
    chosen: dict[int, Action] = {}
    for block, layer in zip(reversed(needs.order), reversed(layers), strict=True):
        chosen[block] = needs.actions[block][int(layer.actions[point])]
        point = int(layer.parents[point])
    return [chosen[block] for block in range(len(chosen))]
