"""What `verify` can put back, and what it sees of a change."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_ckpt.core.sameness import ABSENT, is_equal
from lightning_ckpt.core.snapshot import Snapshot


class Thing:
    """An object that is neither module nor container."""

    def __init__(self) -> None:
        self.count = 0
        self.inner: Any = None


class Full(nn.Module):
    """One of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.scale = torch.ones(2)
        self.counts = {"a": 1, "b": [1, 2]}
        self.order = OrderedDict(x=1, y=2)
        self.recent: deque[int] = deque([1, 2], maxlen=3)
        self.names = {"one"}
        self.table = np.zeros(3)
        self.thing = Thing()
        self.thing.inner = Thing()
        self.torch_stream = torch.Generator().manual_seed(1)
        self.numpy_stream = np.random.default_rng(1)
        self.python_stream = random.Random(1)
        self.callback = print


CHANGES: dict[str, Callable[[Full], Any]] = {
    ".linear.weight": lambda m: m.linear.weight.data.add_(1),
    ".norm.running_mean": lambda m: m.norm.running_mean.add_(1),  # type: ignore[union-attr]
    ".scale": lambda m: setattr(m, "scale", torch.zeros(2)),
    ".linear.weight.grad": lambda m: setattr(m.linear.weight, "grad", torch.ones(2, 2)),
    ".counts['a']": lambda m: m.counts.update(a=2),
    ".counts['c']": lambda m: m.counts.update(c=2),
    ".counts['b'][2]": lambda m: m.counts["b"].append(3),  # type: ignore[attr-defined]
    ".order['x']": lambda m: m.order.pop("x"),
    ".recent[2]": lambda m: m.recent.append(3),
    ".names": lambda m: m.names.add("two"),
    ".table": lambda m: m.table.fill(1),
    ".thing.count": lambda m: setattr(m.thing, "count", 1),
    ".thing.inner.count": lambda m: setattr(m.thing.inner, "count", 1),
    ".torch_stream": lambda m: torch.rand(1, generator=m.torch_stream),
    ".numpy_stream": lambda m: m.numpy_stream.random(),
    ".python_stream": lambda m: m.python_stream.random(),
    ".linear.training": lambda m: m.linear.eval(),
    ".extra": lambda m: setattr(m, "extra", 1),
    ".late.weight": lambda m: m.add_module("late", nn.Linear(1, 1)),
    "generator of torch on cpu": lambda m: torch.rand(1),
    "generator random": lambda m: random.random(),
    "generator numpy.random": lambda m: np.random.random(),
}


@pytest.mark.parametrize("path", CHANGES)
def test_each_change_is_seen_and_undone(path: str) -> None:
    """And the objects are the same ones afterwards."""
    model = Full()
    owners = [model.counts, model.counts["b"], model.thing.inner, model.linear.weight, model.table]
    snapshot = Snapshot({"": model})
    assert snapshot.changes() == {}
    CHANGES[path](model)
    assert path in snapshot.changes()
    snapshot.restore()
    assert snapshot.changes() == {}
    now = [model.counts, model.counts["b"], model.thing.inner, model.linear.weight, model.table]
    assert all(one is other for one, other in zip(owners, now, strict=True))
    assert list(model.order) == ["x", "y"]
    assert not hasattr(model, "extra")


def test_flags_are_given_back() -> None:
    model = Full()
    snapshot = Snapshot({"": model})
    model.linear.weight.requires_grad_(False)
    snapshot.restore()
    assert model.linear.weight.requires_grad


def test_replaced_storage_and_other_shape() -> None:
    """`.data =` keeps the object, and so does the way back."""
    model = Full()
    weight = model.linear.weight
    before = weight.detach().clone()
    snapshot = Snapshot({"": model})
    weight.data = torch.zeros(3, 3)
    snapshot.restore()
    assert model.linear.weight is weight
    assert torch.equal(weight, before)


def test_graphs_that_saved_a_parameter_stay_valid() -> None:
    model = Full()
    x = torch.ones(2, requires_grad=True)
    result = model.linear(x).sum()
    snapshot = Snapshot({"": model})
    model.linear.weight.data.add_(1)
    snapshot.restore()
    result.backward()
    assert torch.equal(x.grad, model.linear.weight.sum(0))  # type: ignore[arg-type]


def test_what_is_gone_is_absent() -> None:
    model = Full()
    snapshot = Snapshot({"": model})
    del model.scale
    assert snapshot.changes()[".scale"] is ABSENT


def test_strangers_are_not_looked_into() -> None:
    model, stranger = Full(), Thing()
    model.thing.inner = stranger
    snapshot = Snapshot({"": model}, [stranger])
    stranger.count = 7
    assert snapshot.changes() == {}
    snapshot.restore()
    assert stranger.count == 7


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]), True),
        (torch.tensor([1.0, torch.nan]), torch.tensor([torch.nan, 1.0]), False),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), False),
        (torch.zeros(2), torch.zeros(2, 1), False),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn), True),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.zeros(2).to(torch.float8_e4m3fn), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (float("nan"), float("nan"), True),
        (1, True, False),
        (np.zeros(2), np.zeros(2), True),
        (np.zeros(2), np.ones(2), False),
        (ABSENT, None, False),
    ],
)
def test_equality(one: Any, other: Any, same: bool) -> None:
    assert is_equal(one, other) is same


def test_transformers_outputs_are_put_back() -> None:
    """They forbid `update`, `pop` and `clear`."""
    outputs = pytest.importorskip("transformers.modeling_outputs")
    value = outputs.BaseModelOutput(last_hidden_state=torch.zeros(2))
    snapshot = Snapshot({"batch": value})
    value["last_hidden_state"] = torch.ones(2)
    snapshot.restore()
    assert torch.equal(value["last_hidden_state"], torch.zeros(2))
    assert torch.equal(value.last_hidden_state, torch.zeros(2))
