"""How large a batch is, and the features that the bytes of a step are a sum of."""

from __future__ import annotations

import time
from collections import OrderedDict, UserDict, deque
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_ckpt.core.budget.sizes import MOST_SIDES, Size, features, size_of

pytestmark = pytest.mark.filterwarnings("ignore:.*nested tensors.*prototype")


@dataclass
class Sample:
    ids: Tensor
    name: str = "a"


class Graph:
    """A batch of a library's own class, with its tensors one level below."""

    def __init__(self) -> None:
        self._store = {"x": torch.zeros(5, 3), "edges": torch.zeros(2, 9)}


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@pytest.mark.parametrize(
    ("batch", "shapes"),
    [
        (torch.zeros(2, 3), [(2, 3)]),
        ({"ids": torch.zeros(2, 3), "n": 7, "labels": torch.zeros(2)}, [(2, 3), (2,)]),
        ([torch.zeros(2), (torch.zeros(3), "text", None)], [(2,), (3,)]),
        (UserDict({"ids": torch.zeros(4, 1)}), [(4, 1)]),
        (OrderedDict(a=deque([torch.zeros(1)])), [(1,)]),
        (Sample(torch.zeros(2, 2)), [(2, 2)]),
        (Graph(), [(5, 3), (2, 9)]),
        (Pair(torch.zeros(1), torch.zeros(2)), [(1,), (2,)]),
        (torch.zeros(()), [()]),
        (["some", "text"], []),
        (None, []),
    ],
)
def test_all_tensors_of_a_batch_count(batch: Any, shapes: list[tuple[int, ...]]) -> None:
    assert size_of(batch).shapes == shapes


def test_what_has_no_plain_shape() -> None:
    parts = [torch.zeros(2, 4), torch.zeros(5, 4)]
    assert size_of(torch.nested.nested_tensor(parts, layout=torch.jagged)).shapes == [(7, 4)]
    assert size_of(torch.nested.nested_tensor(parts)).shapes == [(28,)]
    assert size_of(torch.zeros(3, 4).to_sparse()).shapes == [(3, 4)]
    packed = size_of(pack_sequence([torch.zeros(3, 2), torch.zeros(1, 2)]))
    assert packed.shapes[0] == (4, 2)


def test_a_batch_that_holds_itself_ends() -> None:
    batch: list[Any] = [torch.zeros(2)]
    batch.append(batch)
    assert size_of(batch).shapes[0] == (2,)


def test_many_tensors_are_told_in_few_numbers() -> None:
    """As many boxes and images as a detector gets; the size is as long for any number of them."""
    few = size_of([[torch.zeros(3, 8, i + 1), torch.zeros(i, 4)] for i in range(10)])
    many = size_of([[torch.zeros(3, 9, i + 1), torch.zeros(i, 4)] for i in range(30)])
    assert few.structure == many.structure
    assert few.shapes == [(10, 9, 4, 180), (10, 3, 8, 10, 1320)]
    assert few.num_elements == 1500
    assert len(many.dims) == len(few.dims)
    assert "largest sides" in str(few)


def test_a_size_has_so_many_sides_at_most() -> None:
    """The ranks exchange as many numbers for each batch."""
    shapes = [(1,) * n for n in range(12)]
    for batch in ([torch.zeros(shape) for shape in shapes] * 3, [torch.zeros((2,) * 6)] * 16):
        assert 0 < len(size_of(batch).dims) <= MOST_SIDES
    assert size_of(torch.zeros((2,) * 10)).shapes == [(8, *(2,) * 7)]


def test_sizes_compare_where_their_structure_is_one() -> None:
    first, second = size_of(torch.zeros(2, 3)), size_of({"a": torch.zeros(4, 5)})
    assert first.structure == second.structure
    assert first != second
    assert first == size_of([torch.ones(2, 3)])
    for other in (size_of(torch.zeros(2)), size_of(torch.zeros(2, 3), kind=1)):
        assert first.structure != other.structure
        assert first.checksum != other.checksum
    assert str(size_of({"a": torch.zeros(2, 3), "b": torch.zeros(2, 3)})) == "tensors of (2, 3)"
    assert str(size_of(None)) == "no tensors"


def test_it_costs_a_few_microseconds() -> None:
    batch = {name: torch.zeros(4, 8) for name in ("input_ids", "labels", "attention_mask")}
    taken = []
    for _ in range(20):
        begin = time.process_time()
        for _ in range(50):
            size_of(batch)
        taken.append((time.process_time() - begin) / 50)
    assert min(taken) < 50e-6


def spans(sizes: list[Size], function: Any) -> bool:
    """Whether the features of these sizes give the function exactly."""
    table = features(sizes)
    values = np.array([function(*size.dims) for size in sizes], float)
    found = table @ np.linalg.lstsq(table, values, rcond=None)[0]
    return bool(np.allclose(found, values, rtol=1e-9, atol=1e-6 * np.abs(values).max()))


def random_sizes(ndims: tuple[int, ...], num: int = 60, fixed: dict[int, int] = {}) -> list[Size]:  # noqa: B006
    rng = np.random.default_rng(0)
    sides = rng.integers(3, 90, (num, sum(ndims)))
    for index, value in fixed.items():
        sides[:, index] = value
    return [Size(0, ndims, tuple(row)) for row in sides.tolist()]


@pytest.mark.parametrize(
    ("ndims", "fixed", "function"),
    [
        ((2,), {}, lambda b, t: 7 + b * t * 3 + 5 * b * t * t + t * t + t),
        ((2,), {0: 4}, lambda b, t: 7 + b * t * 3 + 5 * b * t * t),
        ((2,), {}, lambda t, b: 7 + b * t * 3 + 5 * b * t * t),  # the length may come first
        ((2, 2), {0: 4, 2: 4}, lambda b, s, _, t: b * (s + t + s * s + t * t + s * t)),
        ((4,), {0: 8, 1: 3}, lambda b, c, h, w: b * c * h * w + 9 * h + (h * w) ** 2),
        ((3,), {2: 16}, lambda b, t, f: b * t * f + b * t * t),
        ((1, 1), {}, lambda n, e: 3 * n + 5 * e + n * n),
    ],
)
def test_what_models_take_is_in_the_span(
    ndims: tuple[int, ...], fixed: dict[int, int], function: Any
) -> None:
    assert spans(random_sizes(ndims, fixed=fixed), function)


def test_the_span_is_no_larger_than_it_must_be() -> None:
    """One length: three features, whatever the batch repeats of it."""
    sizes = [Size(0, (2, 2, 1), (4, t, 4, t + 1, 4)) for t in (5, 9, 30, 31)]
    assert features(sizes).shape == (4, 3)
    assert not spans([Size(0, (1,), (n,)) for n in (1, 3, 7, 20, 50)], lambda n: n**3)
    assert features([Size(0, (2,), (4, 8))] * 3).shape == (3, 1)
    assert features([Size(0, (), ())] * 2).shape == (2, 1)
