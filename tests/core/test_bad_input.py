"""Bad arguments: the type of the error, the argument's name, the value, and a way out."""

from __future__ import annotations

import re
from typing import Any

import pytest
from helpers import MlpBlock, Stack
from torch import nn

from lightning_ckpt import PartialCheckpoint, apply_partial_checkpoint, find_blocks


def classes(model: nn.Module) -> list[type]:
    """The classes of all modules."""
    return [type(m) for m in model.modules()]


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (0, ValueError),
        (-1, ValueError),
        (2.5, TypeError),
        (2.0, TypeError),
        (True, TypeError),
        (False, TypeError),
        ("2", TypeError),
        (None, TypeError),
        ([1], TypeError),
    ],
    ids=repr,
)
def test_every_n(value: Any, error: type[Exception]) -> None:
    """Report G5, G4: no silent acceptance of what Transformers takes without a word."""
    model = Stack()
    before = classes(model)
    with pytest.raises(error, match="every_n") as caught:
        apply_partial_checkpoint(model, every_n=value)
    text = str(caught.value)
    assert repr(value) in text
    assert "\n" not in text.strip()
    assert classes(model) == before


@pytest.mark.parametrize("value", ["yes", "gpu", "hots", "", 1, 0, 2.0, None, ["host"]], ids=repr)
def test_offload(value: Any) -> None:
    """An unknown word or a number: named, with the choices."""
    model = Stack()
    before = classes(model)
    with pytest.raises((ValueError, TypeError), match="offload") as caught:
        apply_partial_checkpoint(model, offload=value)
    text = str(caught.value)
    assert repr(value) in text
    assert "True" in text, "the way out names a good value"
    assert classes(model) == before


class Unused(nn.Module):
    """A class that no model here has."""


@pytest.mark.parametrize(
    ("layers", "name"),
    [
        ("no_such_layer", "no_such_layer"),
        (["no_such_layer"], "no_such_layer"),
        (["layers.*", "no_such_layer"], "no_such_layer"),
        ("layres.*", "layres.*"),
        ("MlpBlok", "MlpBlok"),
        (Unused, "Unused"),
        ([MlpBlock, Unused], "Unused"),
        ("layers.9", "layers.9"),
    ],
)
def test_layers_that_match_nothing(layers: Any, name: str) -> None:
    """Report A13, pitfall 56: an error that names what matched nothing, and near candidates."""
    model = Stack()
    before = classes(model)
    for make in (
        lambda: apply_partial_checkpoint(model, layers=layers),
        lambda: find_blocks(model, layers),
    ):
        with pytest.raises(ValueError, match=re.escape(name)) as caught:
            make()
        assert "layers" in str(caught.value)
        assert re.search(r"MlpBlock|'layers\.[*0]'", str(caught.value).replace(repr(name), ""))
    assert classes(model) == before


def test_near_candidates_are_shown() -> None:
    """A typo in a class name or a pattern is answered with the right one."""
    with pytest.raises(ValueError, match="MlpBlock"):
        find_blocks(Stack(), "MlpBlok")
    with pytest.raises(ValueError, match=r"layers\."):
        find_blocks(Stack(), "layer.*")


def test_predicate_that_matches_nothing() -> None:
    """Report A13: a predicate that is never true is an error as well."""
    with pytest.raises(ValueError, match="layers"):
        apply_partial_checkpoint(Stack(), layers=lambda name, module: False)


@pytest.mark.parametrize("takes", [lambda: True, lambda module: True, lambda a, b, c: True])
def test_predicate_of_other_arguments(takes: Any) -> None:
    """Said before it is called, with the argument's name; further defaults do no harm."""
    with pytest.raises(TypeError, match=r"layers holds .* does not take \(name, module\)"):
        PartialCheckpoint(layers=takes)
    with apply_partial_checkpoint(Stack(), layers=lambda n, m, c=MlpBlock: type(m) is c) as handle:
        assert handle.plan.num_recomputed


@pytest.mark.parametrize("layers", [3, 2.5, [3], [None], True, nn.Linear(2, 2), {}], ids=repr)
def test_layers_of_a_wrong_type(layers: Any) -> None:
    """A number, an instance: the argument and what it may be."""
    with pytest.raises((TypeError, ValueError), match="layers"):
        apply_partial_checkpoint(Stack(), layers=layers)


@pytest.mark.parametrize("layers", [[], (), ""], ids=repr)
def test_empty_layers(layers: Any) -> None:
    """Nothing named is nothing matched, never a silent no-op."""
    with pytest.raises((TypeError, ValueError), match="layers"):
        apply_partial_checkpoint(Stack(), layers=layers)


def test_class_that_is_no_module() -> None:
    """`layers=int` cannot match anything."""
    with pytest.raises((TypeError, ValueError), match="int"):
        apply_partial_checkpoint(Stack(), layers=int)


def test_nothing_to_find() -> None:
    """Pitfall 56: the candidate classes it saw, and how to name them."""

    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = MlpBlock()
            self.second = nn.TransformerEncoderLayer(8, 2, 8)

    with pytest.raises(ValueError, match="layers=") as caught:
        apply_partial_checkpoint(Plain())
    assert "MlpBlock" in str(caught.value)
    assert "TransformerEncoderLayer" in str(caught.value)


def test_nothing_to_find_among_leaves() -> None:
    """Pitfall 56: a model of leaves only, or a leaf itself."""
    for model in (nn.Linear(2, 2), nn.Bilinear(2, 2, 2)):
        with pytest.raises(ValueError, match="layers="):
            apply_partial_checkpoint(model)


@pytest.mark.parametrize("module", [None, "model", [MlpBlock()], MlpBlock], ids=type)
def test_module_of_a_wrong_type(module: Any) -> None:
    """A list of blocks or a class is not a module."""
    with pytest.raises((TypeError, ValueError), match="module"):
        apply_partial_checkpoint(module)


def test_failed_application_leaves_the_model_alone() -> None:
    """All checks come before the first block is touched."""
    model = Stack()
    model.layers[3] = nn.Identity()
    before = classes(model)
    with pytest.raises(ValueError, match="no_such"):
        apply_partial_checkpoint(model, layers=["layers.0", "no_such"])
    assert classes(model) == before
