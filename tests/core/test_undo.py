"""What a failed try changed is as it was, or there is said to be no way back."""

from __future__ import annotations

import random
import time
from collections import OrderedDict, UserDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from helpers import assert_same, generator_states
from oom_helpers import bits
from torch import Tensor, nn

from lightning_ckpt.core.out_of_memory.undo import StateBefore

LARGE = 64 * 1024  # elements of 4 bytes: beyond what is copied


class Helper:
    def __init__(self) -> None:
        self.count = 0


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("small", torch.tensor([1.0, -0.0, float("nan")]))
        self.register_buffer("large", torch.zeros(LARGE))
        self.attribute = torch.ones(3)
        self.count = 0
        self.names = ["a"]
        self.nested = {"deep": [{"x": torch.zeros(2)}]}
        self.queue: deque[int] = deque([1, 2])
        self.met = {1, 2}
        self.array = np.zeros(3)
        self.generator = torch.Generator().manual_seed(1)
        self.draws = np.random.default_rng(1)
        self.python = random.Random(1)
        self.hidden = [nn.Linear(2, 2)]  # nobody registers it
        self.helper = Helper()
        self.optional: Tensor | None = None


def left(model: Model) -> Any:
    return bits(
        [
            model.state_dict(),
            model.attribute,
            model.count,
            model.names,
            model.nested,
            list(model.queue),
            model.met,
            model.array.tolist(),
            model.generator.get_state(),
            str(model.draws.bit_generator.state),
            model.python.getstate(),
            [vars(layer)["training"] for layer in model.hidden],
            model.optional,
            sorted(vars(model)),
            list(model._modules),
            generator_states(),
        ]
    )


def change_all(model: Model) -> None:
    model.norm(torch.randn(3, 4))
    model.small.data.add_(1)
    model.attribute.mul_(2)
    model.count += 1
    model.names.append("b")
    model.nested["deep"][0]["x"].add_(1)
    model.nested["deep"].append({})
    model.nested["more"] = []
    model.queue.popleft()
    model.met.add(3)
    model.array += 1
    torch.rand(1, generator=model.generator)
    model.draws.random()
    model.python.random()
    random.random()
    np.random.rand()
    model.hidden[0].eval()
    model.optional = torch.ones(1)
    model.new = 3
    model.added = nn.Linear(1, 1)
    del model.names


def test_everything_is_put_back_in_place() -> None:
    model = Model()
    before, names, small, norm = left(model), model.names, model.small, model.norm.running_mean
    state = StateBefore(model)
    for _ in range(2):  # two tries, one state
        change_all(model)
        assert state.obstacle() is None
        state.restore()
        assert_same(left(model), before)
    assert model.names is names
    assert model.small is small
    assert model.norm.running_mean is norm


def test_attributes_that_are_bound_anew_are_those_of_before() -> None:
    model = Model()
    model.small = torch.ones(5)
    small, attribute = model.small, model.attribute
    state = StateBefore(model)
    model.small = torch.zeros(2)
    model.attribute = model.attribute + 1
    state.restore()
    assert model.small is small
    assert model.attribute is attribute


def test_a_tensor_of_another_shape_is_resized() -> None:
    model = Model()
    state = StateBefore(model)
    model.attribute.resize_(7)
    state.restore()
    assert model.attribute.tolist() == [1, 1, 1]


def test_graphs_that_saved_a_buffer_stay_valid() -> None:
    """Of a step before (truncated backward)."""
    model = Model()
    x = torch.ones(3, requires_grad=True)
    loss = (x * model.attribute).sum()
    state = StateBefore(model)
    state.restore()
    loss.backward()


class Graph:
    """A batch of a graph library's."""

    def __init__(self) -> None:
        self.x = torch.ones(3)
        self.stores = [Helper()]


class Words(OrderedDict):
    """As Transformers' `ModelOutput`: entries are attributes too."""

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, value)
        object.__setattr__(self, key, value)


def test_a_batch_is_looked_into() -> None:
    graph, words, user = Graph(), Words(), UserDict({"ids": torch.zeros(2)})
    words["ids"] = ids = torch.zeros(2)
    batch = {"x": torch.ones(3), "labels": [1], "graph": graph, "words": words, "user": user}
    state = StateBefore(nn.Linear(1, 1), [batch])
    labels = batch.pop("labels")
    batch["x"].add_(1)
    graph.x.zero_()
    graph.stores[0].count = 7
    graph.more = 1  # type: ignore[attr-defined]
    words["ids"] = torch.ones(5)
    words["mask"] = 1
    user["ids"].add_(1)
    del user["ids"]
    state.restore()
    assert batch["labels"] is labels
    assert batch["x"].tolist() == graph.x.tolist() == [1, 1, 1]
    assert graph.stores[0].count == 0
    assert not hasattr(graph, "more")
    assert list(words) == ["ids"]
    assert words["ids"] is words.ids is ids
    assert not hasattr(words, "mask")
    assert user["ids"].tolist() == [0, 0]


def test_gradients_and_flags_of_a_batch() -> None:
    x = torch.ones(3)
    kept = torch.ones(3, requires_grad=True)
    kept.grad = grad = torch.ones(3)
    state = StateBefore(nn.Linear(1, 1), [x, kept])
    x.requires_grad_()
    (x * 2).sum().backward()
    kept.grad = None
    state.restore()
    assert not x.requires_grad
    assert x.grad is None
    assert kept.grad is grad
    (kept * 2).sum().backward()
    assert "the gradient of a tensor of shape (3,)" in str(state.obstacle())


def move_parameter(model: Model) -> None:
    with torch.no_grad():
        model.norm.weight.add_(1)


def move_large(model: Model) -> None:
    model.large.add_(1)


def move_one_of_many(model: Model) -> None:
    model.many[50].add_(1)


@pytest.mark.parametrize(
    ("move", "words"),
    [
        (move_parameter, "parameter 'norm.weight' was changed in place"),
        (move_large, "buffer 'large' was changed in place"),
        (move_one_of_many, r"a tensor of shape \(1,\) was changed in place"),
    ],
)
def test_what_is_not_copied_must_not_move(move: Any, words: str) -> None:
    model = Model()
    model.many = [torch.zeros(1) for _ in range(100)]
    state = StateBefore(model)
    assert state.obstacle() is None
    move(model)
    with pytest.raises(AssertionError, match=words):
        assert not state.obstacle(), state.obstacle()


def test_a_lazy_module_that_was_made_is_an_obstacle() -> None:
    model = nn.Sequential(nn.LazyLinear(2, bias=False))
    state = StateBefore(model)
    model(torch.ones(1, 3))
    assert "parameter '0.weight'" in str(state.obstacle())


def test_strangers_and_insides_of_attributes_are_left_alone() -> None:
    """As in a recompute: an object that is an attribute may be anything, a whole data set."""
    model, trainer = Model(), {"batches": [1]}
    model.trainer = trainer
    state = StateBefore(model, [{"trainer": trainer}], [trainer])
    model.helper.count = trainer["batches"][0] = 7
    state.restore()
    assert model.helper.count == trainer["batches"][0] == 7


def test_of_a_metric_that_keeps_everything_nothing_is_copied() -> None:
    model = Model()
    model.many = [torch.zeros(1) for _ in range(100)]
    few, many = StateBefore(Model()), StateBefore(model)

    def copies(state: StateBefore) -> int:
        return sum(seen.copy is not None for seen in state._tensors)

    assert copies(many) == copies(few)
    model.many.append(torch.ones(1))
    many.restore()
    assert len(model.many) == 100


def test_meta_and_inference_tensors() -> None:
    model = Model()
    model.meta = torch.zeros(2, device="meta")
    with torch.inference_mode():
        model.frozen = torch.zeros(2)
    state = StateBefore(model)
    assert state.obstacle() is None
    state.restore()


def test_a_look_is_cheap() -> None:
    """By CPU time: 400 modules in less than the forward of a few small ones."""
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(400)))
    times = []
    for _ in range(5):
        begin = time.process_time()
        StateBefore(model)
        times.append(time.process_time() - begin)
    assert min(times) < 0.05


class Counting:
    """Takes part in a step, and is no module."""

    def __init__(self) -> None:
        self.count = 0
        self.norms: list[float] = []
        self.average = nn.Linear(2, 2)


def test_others_that_take_part_are_put_back_too() -> None:
    other = Counting()
    norms = other.norms
    state = StateBefore(Model(), others=[other])
    other.count += 1
    other.norms.append(1.0)
    assert state.obstacle() is None
    state.restore()
    assert (other.count, other.norms) == (0, [])
    assert other.norms is norms
    with torch.no_grad():
        other.average.weight.add_(1)
    assert "was changed in place" in str(state.obstacle())


@pytest.mark.parametrize("in_batch", [False, True])
def test_an_iterator_cannot_be_turned_back(in_batch: bool) -> None:
    model = Model()
    numbers = (number for number in range(3))
    if not in_batch:
        model.numbers = numbers
    state = StateBefore(model, [{"numbers": numbers}] if in_batch else [])
    assert "a generator in the batch or in an attribute" in str(state.obstacle())


def test_a_file_is_no_iterator(tmp_path: Any) -> None:
    model = Model()
    with (tmp_path / "log").open("w") as model.file:
        assert StateBefore(model).obstacle() is None
