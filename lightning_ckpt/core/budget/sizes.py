"""How large a batch is, and what of that the bytes of a training step may go by."""

import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from itertools import combinations_with_replacement, pairwise
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_ckpt.core.arguments import PLAIN, is_opaque

MOST_SIDES = 62  # that a size has
_NUM_TENSORS = 16  # more are told by their number, their largest sides and their sum
_NUM_DIMENSIONS = 8  # of a tensor; the first of more count as one
_DEPTH = 6
_GROUPED = -1


class Size(NamedTuple):
    """The shapes of the tensors in a batch.

    Attributes:
        kind: what else makes batches unlike (the first of those whose gradients are accumulated).
        ndims: how many dimensions each tensor has; of many tensors, `_GROUPED` and each number of
            dimensions that occurs.
        dims: all sides, one tensor after the other; of many tensors, for each number of dimensions:
            how many there are, the largest of each side, the number of all elements.
    """

    kind: int
    ndims: tuple[int, ...]
    dims: tuple[int, ...]

    @property
    def structure(self) -> tuple[int, ...]:
        """What two sizes must share to be compared."""
        return self.kind, *self.ndims

    @property
    def checksum(self) -> int:
        """Of the structure."""
        return zlib.crc32(repr(self.structure).encode())

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The sides, tensor by tensor."""
        extra = 0
        ndims = self.ndims
        if ndims[:1] == (_GROUPED,):
            ndims, extra = ndims[1:], 2
        ends = np.cumsum([0, *(ndim + extra for ndim in ndims)]).tolist()
        return [self.dims[a:b] for a, b in pairwise(ends)]

    @property
    def num_elements(self) -> int:
        """How large the batch is, to put sizes in an order."""
        if self.ndims[:1] == (_GROUPED,):
            return sum(shape[-1] for shape in self.shapes)
        return sum(map(prod, self.shapes))

    def __str__(self) -> str:
        shapes = list(dict.fromkeys(map(str, self.shapes)))
        if self.ndims[:1] == (_GROUPED,):
            return f"tensors whose number, largest sides and elements are {' and '.join(shapes)}"
        return f"tensors of {' and '.join(shapes)}" if shapes else "no tensors"


def size_of(batch: Any, kind: int = 0) -> Size:
    """The size of a batch: of the tensors in nested containers, dataclasses and plain objects.

    Args:
        batch: as a training step gets it.
        kind: what else makes batches unlike.
    """
    shapes = list(_shapes(batch, _DEPTH))
    if len(shapes) > _NUM_TENSORS or sum(map(len, shapes)) > MOST_SIDES:
        return _grouped(shapes, kind)
    return Size(kind, tuple(map(len, shapes)), tuple(side for shape in shapes for side in shape))


def _shapes(value: Any, depth: int) -> Iterator[tuple[int, ...]]:
    if isinstance(value, Tensor):
        yield _shape(value)
    elif type(value) in PLAIN or not depth:
        return
    elif isinstance(value, (dict, Mapping)):  # the first is quickly told
        for item in value.values():
            yield from _shapes(item, depth - 1)
    elif isinstance(value, (list, tuple, deque, Set)):
        for item in value:
            yield from _shapes(item, depth - 1)
    elif is_opaque(value):
        for item in vars(value).values():
            yield from _shapes(item, depth - 1)


def _shape(tensor: Tensor) -> tuple[int, ...]:
    if not tensor.is_nested:
        shape = tuple(tensor.shape)
        more = len(shape) - _NUM_DIMENSIONS
        return shape if more <= 0 else (prod(shape[: more + 1]), *shape[more + 1 :])
    # The shape of a nested tensor is no tuple of numbers.
    return tuple(tensor.values().shape) if tensor.layout == torch.jagged else (tensor.numel(),)


def _grouped(shapes: Sequence[tuple[int, ...]], kind: int) -> Size:
    ndims = sorted({len(shape) for shape in shapes})
    dims: list[int] = []
    for ndim in ndims:
        same = [shape for shape in shapes if len(shape) == ndim]
        dims += [len(same), *map(max, zip(*same, strict=True)), sum(map(prod, same))]
    return Size(kind, (_GROUPED, *ndims), tuple(dims))


def features(sizes: Sequence[Size]) -> NDArray[np.float64]:
    """What the bytes of a step may be a sum of, one row for each size, all of one structure.

    Those are the products, up to the third degree and with no side more than squared, of the sides
    that vary; of a tensor with more than two sides, of the first and of the product of the others,
    and those others alone. So bytes that grow with batch x length (activations), batch x length
    squared (scores of attention), source x target (scores across) or width and height are all in
    the span. With more sides that vary the degree is lower.
    """
    curved, linear = zip(*map(_variables, sizes), strict=True)
    columns = _distinct(np.array(curved, float).reshape(len(sizes), -1))
    more = _distinct(np.array(linear, float).reshape(len(sizes), -1))
    num = columns.shape[1]
    degree = 3 if num <= 3 else 2 if num <= 6 else 1
    rows = [np.ones(len(sizes))]
    for order in range(1, degree + 1):
        for chosen in combinations_with_replacement(range(num), order):
            if max(map(chosen.count, chosen)) <= 2:
                rows.append(np.prod(columns[:, chosen], axis=1))
    return np.column_stack([*rows, more])


def _variables(size: Size) -> tuple[list[int], list[int]]:
    """Sides that count with their products, and sides that count alone."""
    if size.ndims[:1] == (_GROUPED,):
        return [shape[-1] for shape in size.shapes], list(size.dims)
    curved: list[int] = []
    linear: list[int] = []
    for shape in size.shapes:
        if len(shape) > 2:
            curved += [shape[0], prod(shape[1:])]
            linear += shape[1:]
        else:
            curved += shape
    return curved, linear


def _distinct(columns: NDArray[np.float64]) -> NDArray[np.float64]:
    """The columns that vary, from 0 to 1, each once. (A length and the same plus one are one.)"""
    low = columns.min(axis=0, initial=np.inf)
    spread = columns.max(axis=0, initial=-np.inf) - low
    varies = spread > 0
    scaled = (columns[:, varies] - low[varies]) / spread[varies]
    if not scaled.size:
        return scaled
    _, first = np.unique(scaled.round(12), axis=1, return_index=True)
    return scaled[:, np.sort(first)]
