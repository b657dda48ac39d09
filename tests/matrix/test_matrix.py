"""The matrix: each row trained plain and checkpointed, and held against each other.

`MATRIX_RESULTS=FILE pytest tests/matrix` writes what was found to a file, one JSON object a line;
`python tests/matrix/make_page.py FILE` makes `docs/models.md` of it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import make_page
import pytest
from helpers import compare, seed_all
from matrix_rows import CannotRun, Row, describe
from matrix_table import CONVOLUTIONAL, ROWS, TRANSFORMERS
from torch import nn

from lightning_ckpt import find_blocks
from lightning_ckpt.core.arguments import flatten
from lightning_ckpt.core.memory import track_peak
from lightning_ckpt.core.verify import verify

# What libraries say of models as small as these, and of their own coming versions.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:Initializing zero-element tensors is a no-op"),
]

STEPS = 3


@pytest.fixture(scope="module")
def results() -> Iterator[list[dict[str, Any]]]:
    """What is found, for the page."""
    found: list[dict[str, Any]] = []
    yield found
    if path := os.environ.get("MATRIX_RESULTS"):
        Path(path).write_text("".join(f"{json.dumps(entry)}\n" for entry in found))


def loss_of(output: Any) -> Any:
    """The model's own loss, or the mean square of all that it returns."""
    own = getattr(output, "loss", None)
    if own is not None:
        return own
    return sum(t.abs().pow(2).mean() for t in flatten(output).tensors if t.requires_grad)


def train(row: Row) -> list[int]:
    """Compare `STEPS` steps; returns the peaks of the first one, checkpointed and plain."""
    peaks: list[int] = []

    def step(model: nn.Module, index: int) -> Any:
        if row.step is not None:
            return row.step(model, index)
        loss = loss_of(model(**row.batch()))
        loss.backward()
        return loss.detach()

    def measured(model: nn.Module, index: int) -> Any:
        if index > 0:
            return step(model, index)
        with track_peak(model) as tracker:
            value = step(model, index)
        peaks.append(tracker.peak_bytes)
        return value

    compare(row.model, measured, steps=STEPS, ratio=row.ratio, layers=row.layers)
    return peaks


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(row: Row, results: list[dict[str, Any]]) -> None:
    entry: dict[str, Any] = {
        "name": row.name,
        "kind": row.kind,
        "blocks": row.blocks,
        "status": "failed",
        "note": row.note,
    }
    results.append(entry)
    seed_all(0)
    try:
        model = row.model()
    except CannotRun as reason:
        entry.update(status="did not run", note=str(reason))
        pytest.skip(str(reason))
    assert describe(find_blocks(model, row.layers)) == row.blocks
    if not row.repeats:
        report = verify(model, row.batch(), loss=lambda module, batch: loss_of(module(**batch)))
        assert report.differences
        assert all(difference.in_plain_too for difference in report.differences)
        entry["status"] = "plain training does not repeat"
        return
    ours, plain = train(row)
    entry["peak"] = round(ours / plain, 2)
    assert ours < plain or not row.saves
    entry["status"] = "same"


def test_rows_are_as_many_as_promised() -> None:
    """At least sixty families of Transformers, fifteen of them with convolutions or stages."""
    assert sum(map(len, TRANSFORMERS.values())) >= 60
    assert len(CONVOLUTIONAL) >= 15
    assert len({row.name for row in ROWS}) == len(ROWS)


def test_the_page_shows_each_row() -> None:
    """Whoever adds a row makes `docs/models.md` anew."""
    lines = make_page.PAGE.read_text().splitlines()
    shown = [line.split(" | ")[:2] for line in lines if line.startswith("| ")]
    for row in ROWS:
        entry = {"name": row.name, "blocks": row.blocks, "status": "", "note": ""}
        assert make_page.row_of(entry).split(" | ")[:2] in shown
    assert not any("| failed" in line for line in lines)
