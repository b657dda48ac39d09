"""A row of the matrix: a family, a tiny model of it, and what is expected of its blocks."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from matrix_sizes import Batch, make_config
from torch import nn

from lightning_ckpt import Block


@dataclass(frozen=True)
class Row:
    """One family.

    Attributes:
        name: what the row is called.
        blocks: what `find_blocks` should choose, as `describe` writes it. Reviewed by eye: the
            repeated layers that a person would name.
        model: makes the model, in training mode, after seeding.
        batch: keyword arguments of its forward, the same at each call.
        kind: under which heading it is listed.
        ratio: how often a recomputed block runs in a step, in terms of plain training; None: more
            often in sum, with `note` saying why no single number can be said.
        saves: whether the peak of live bytes must be lower, `note` says why if not.
        repeats: whether two plain steps are the same. If not, `verify` has to say so, and that is
            all that can be held.
        note: what is peculiar.
        step: forward and backward of step `index`, where a call and its loss will not do.
        layers: as in `apply_partial_checkpoint`, where blocks are not found by themselves.
    """

    name: str
    blocks: str
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    kind: str
    ratio: int | None = 2
    saves: bool = True
    repeats: bool = True
    note: str = ""
    step: Callable[[nn.Module, int], Any] | None = None
    layers: Any = None


@dataclass(frozen=True)
class Family:
    """How a row of a library is written down.

    Attributes:
        name, blocks, batch, ratio, saves, repeats, note: as in `Row`.
        model: name of the model class.
        words: arguments of its config, on top of the small sizes.
    """

    name: str
    model: str
    blocks: str
    batch: Callable[[], Batch]
    words: dict[str, Any] = field(default_factory=dict)
    ratio: int | None = 2
    saves: bool = True
    repeats: bool = True
    note: str = ""


def transformers_row(family: Family, kind: str) -> Row:
    """The row of a family of Transformers. Nothing is imported before the model is made."""

    def make() -> nn.Module:
        transformers = importlib.import_module("transformers")
        cls = getattr(transformers, family.model, None)
        if cls is None or transformers.__version__ < "5":  # names inside were others in 4
            raise CannotRun(f"written for Transformers 5, this is {transformers.__version__}")
        return cls(make_config(cls.config_class, family.words)).train()

    return Row(
        family.name,
        family.blocks,
        make,
        family.batch,
        kind,
        family.ratio,
        family.saves,
        family.repeats,
        family.note,
    )


def describe(blocks: Sequence[Block]) -> str:
    """Blocks by class, how many and where: `LlamaDecoderLayer: 3 model.layers.*`."""
    places: dict[str, Counter[str]] = {}
    for name, module in blocks:
        place = re.sub(r"\d+", "*", name)
        places.setdefault(type(module).__name__, Counter())[place] += 1
    return "; ".join(
        f"{cls}: " + ", ".join(f"{count} {place}" for place, count in counts.items())
        for cls, counts in places.items()
    )


class CannotRun(Exception):
    """The row's library is not here, or does not load, or has no such class."""
