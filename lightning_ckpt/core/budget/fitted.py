"""What a step of a size that was not measured costs, from steps of other sizes that were.

Each number of a `Measurement` is a sum of the features of the batch's size, so the step of a size
whose features are a weighted sum of those of measured sizes is the same weighted sum of their
steps. (That is least squares; the weights also tell how much an error would grow.)
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_ckpt.core.budget.costs import Call, Measurement, Segment
from lightning_ckpt.core.budget.merging import are_alike
from lightning_ckpt.core.budget.sizes import Size, features
from lightning_ckpt.core.plan import is_offloaded

_MOST_WEIGHT = 4.0  # the sum of the weights' amounts: 1 between two sizes, large far from all
_SPARE = 3  # measured sizes beyond those that a fit needs, where it is not exact
_SAFETY = 2.0  # times the largest residual
_EXACT = 1e-3  # residuals beside the largest number, beyond the range that was measured


def fitted(
    sizes: Sequence[Size], steps: Sequence[Measurement], size: Size, *, reach: float = 1.0
) -> Measurement | None:
    """The step of a batch of this size, in bytes rather too large than too small.

    Args:
        sizes: those that were measured, all of one structure.
        steps: what was measured, as `canonical` gives it.
        size: within the range of those; below it, it is taken as large as the smallest.
        reach: how many times as large as the largest it may be, in each side, where the fit is all
            but exact.

    Returns:
        The step, with the seconds of the nearest measured size, since they need only rank the
        actions; None: more sizes must be measured first.
    """
    steps = [_without_offload(step) for step in steps]
    if not sizes or not are_alike(steps):
        return None
    sides = np.array([each.dims for each in sizes]).reshape(len(sizes), -1)
    low, high, own = sides.min(axis=0), sides.max(axis=0), np.array(size.dims, int)
    if (own > reach * high).any() or (own < low / 2).any():
        return None
    lifted = size._replace(dims=tuple(np.maximum(own, low).tolist()))
    table = features([*sizes, lifted])
    rows, row = table[:-1], table[-1]
    weights, _, rank, _ = np.linalg.lstsq(rows.T, row, rcond=None)
    is_spanned = np.abs(weights @ rows - row).max() < 1e-6
    if not is_spanned or np.abs(weights).sum() > _MOST_WEIGHT or len(sizes) <= rank:
        return None
    nearest = min(range(len(sizes)), key=lambda i: abs(sizes[i].num_elements - size.num_elements))
    is_beyond = bool((own > high).any())
    return _weighted(steps, rows, weights, len(sizes) - int(rank), nearest, is_beyond)


def _weighted(
    steps: Sequence[Measurement],
    rows: NDArray[np.float64],
    weights: NDArray[np.float64],
    spare: int,
    nearest: int,
    is_beyond: bool,
) -> Measurement | None:
    leaves: list[Sequence[Any]] = []
    try:
        _combined(steps, leaves.append)
    except _UnlikeError:
        return None
    if not leaves:
        return steps[0]
    values = np.array(leaves, float).T  # (sizes, numbers)
    coefficients = np.linalg.lstsq(rows, values, rcond=None)[0]
    residuals = np.abs(values - rows @ coefficients).max(axis=0)
    residuals[residuals < np.maximum(0.5, 1e-10 * np.abs(values).max(axis=0))] = 0
    is_bytes = [isinstance(same[0], int) for same in leaves]
    if residuals[is_bytes].any() and spare < _SPARE:
        return None
    if is_beyond and (residuals[is_bytes] > _EXACT * values[:, is_bytes].max()).any():
        return None
    margins = _SAFETY * np.abs(weights).sum() * residuals
    numbers = iter(np.ceil(np.maximum(0, weights @ values + margins) - 0.01).astype(np.int64))
    chosen = iter(
        [
            int(n) if by_bytes else same[nearest]
            for n, by_bytes, same in zip(numbers, is_bytes, leaves, strict=True)
        ]
    )
    made: Measurement = _combined(steps, lambda _: next(chosen))
    return made


class _UnlikeError(ValueError):
    """Steps that are not made of the same parts."""


def _combined(values: Sequence[Any], combine: Callable[[Sequence[Any]], Any]) -> Any:
    """Plain data of the same shape as one: with `combine` of the numbers that are not all equal."""
    first = values[0]
    if isinstance(first, Mapping):
        return {key: _combined([value[key] for value in values], combine) for key in first}
    if isinstance(first, tuple):
        items = [_combined(same, combine) for same in zip(*values, strict=True)]
        return type(first)(*items) if hasattr(first, "_fields") else tuple(items)
    if all(value == first for value in values):
        return first
    if not all(isinstance(value, (int, float)) for value in values):
        raise _UnlikeError
    return combine(values)


def _without_offload(step: Measurement) -> Measurement:
    """What is given back must not be taken too large, so it is known of measured sizes alone."""
    calls = (
        Call(call.block, {a: o for a, o in call.options.items() if not is_offloaded(a)})
        for call in step.calls
    )
    return step._replace(calls=tuple(calls))


def canonical(step: Measurement) -> Measurement:
    """The same, with a number of segments that does not go by when results die or gradients are let
    go: what lies outside of blocks between two computations of blocks is one segment, or two before
    a recompute, of which the last counts by itself. Nothing is lost by that."""
    runs = list(_canonical(step.segments))
    first = [*accumulate((number for _, number in runs), initial=0)]  # of each, as it was

    def after(index: int) -> int:  # the first that begins there or later
        return bisect_left(first, index)

    calls = tuple(
        call._replace(
            leaves=None if call.leaves is None else after(call.leaves),
            gone=after(call.gone),
            returns=after(call.returns),  # a recompute, which stands alone
        )
        for call in step.calls
    )
    return step._replace(calls=calls, segments=tuple(_joined(run) for run, _ in runs))


def _canonical(segments: Sequence[Segment]) -> Iterator[tuple[list[Segment], int]]:
    """What becomes one segment, and how many it was."""
    runs = [list(run) for _, run in groupby(segments, key=lambda segment: segment.kind)]
    for index, run in enumerate(runs):
        if run[0].kind != "outside":
            yield from (([segment], 1) for segment in run)
            continue
        is_before_recompute = index + 1 < len(runs) and runs[index + 1][0].kind == "recompute"
        if is_before_recompute:
            yield run[:-1] or [run[0]._replace(peak=run[0].start)], len(run) - 1
            yield [run[-1]], 1
        else:
            yield run, len(run)


def _joined(run: Sequence[Segment]) -> Segment:
    return run[0]._replace(peak=max(segment.peak for segment in run))
