"""What is taken for the loss of a model that nobody explained."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import estimate, verify
from lightning_ckpt.core.loss import model_loss


class Named(nn.Module):
    """Takes its arguments by name or in order, and gives what it is told to."""

    def __init__(self, give: Any = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.give = give or (lambda loss, y: SimpleNamespace(loss=loss))

    def forward(self, x: Tensor, scale: Tensor) -> Any:
        y = x
        for layer in self.layers:
            y = layer(y).tanh()
        return self.give((scale * y).pow(2).mean(), y)


X, SCALE = torch.linspace(-1, 1, 8).view(2, 4), torch.tensor(3.0)


class Encoding(UserDict):  # type: ignore[type-arg]
    """As Transformers' tokenizers give it: a mapping, and no dict."""


BATCHES = {
    "dict": {"x": X, "scale": SCALE},
    "ordered": OrderedDict(scale=SCALE, x=X),
    "no dict": Encoding(x=X, scale=SCALE),
    "tuple": (X, SCALE),
    "list": [X, SCALE],
}


@pytest.mark.parametrize("kind", BATCHES)
def test_every_kind_of_batch_goes_to_verify_and_estimate_alike(kind: str) -> None:
    model = Named()
    assert torch.equal(model_loss(model, BATCHES[kind]), model(X, SCALE).loss)
    report = verify(model, BATCHES[kind], layers=nn.Linear, show=False)
    assert report.ok
    assert sum(report.recomputes.values()) == 3
    by_hand = estimate(model, BATCHES["tuple"], step=lambda m, b: m(*b).loss, layers=nn.Linear)
    assert estimate(model, BATCHES[kind], layers=nn.Linear).every_n == by_hand.every_n


def test_the_tokenizers_own_batch() -> None:
    hf = pytest.importorskip("transformers")
    batch = hf.BatchEncoding({"x": X, "scale": SCALE})
    expected = estimate(Named(), BATCHES["dict"], layers=nn.Linear).every_n
    assert estimate(Named(), batch, layers=nn.Linear).every_n == expected


GIVEN = {
    "loss as attribute": (lambda loss, y: SimpleNamespace(loss=loss), True),
    "loss in a dict": (lambda loss, y: {"loss": loss, "logits": y}, True),
    "one element": (lambda loss, y: loss, True),
    "one element of a shape": (lambda loss, y: loss.view(1), True),
    "a tensor": (lambda loss, y: y, False),
    "a tuple": (lambda loss, y: (y, "word", torch.ones(2)), False),
    "a dict without one": (lambda loss, y: {"loss": None, "logits": y}, False),
}


@pytest.mark.parametrize("kind", GIVEN)
def test_every_kind_of_output(kind: str) -> None:
    give, has_loss = GIVEN[kind]
    model = Named(lambda loss, y: (loss, y))
    loss, y = model(X, SCALE)
    model.give = give
    expected = loss if has_loss else y.pow(2).mean()
    assert torch.equal(model_loss(model, (X, SCALE)).view(()), expected)
    assert verify(model, (X, SCALE), layers=nn.Linear, show=False).ok
    assert len(estimate(model, (X, SCALE), layers=nn.Linear).every_n) == 4


def test_nothing_to_learn_from() -> None:
    model = Named(lambda loss, y: y.detach())
    with pytest.raises(ValueError, match=r"output of Named, a Tensor, .*; pass here=lambda"):
        model_loss(model, (X, SCALE), argument="here")
