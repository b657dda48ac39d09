"""What the pages show works: every Python block is Python and names what there is, and those of
`docs/budget.md` run."""

from __future__ import annotations

import ast
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from app_helpers import ROOT
from torch import Tensor, nn

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BUDGET = ROOT / "docs" / "budget.md"
needs_docs = pytest.mark.skipif(not BUDGET.exists(), reason="a source distribution has no docs")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_blocks_are_python_and_import_what_is_there(page: Path) -> None:
    for block in blocks(page, "python"):
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lightning"):
                module = import_module(str(node.module))
                assert [a.name for a in node.names if not hasattr(module, a.name)] == []


class Model(nn.Module):
    """Stands for the reader's own; small, whatever the page asks for."""

    def __init__(self, num_layers: int = 2, width: int = 8) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(min(num_layers, 4))
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.model.layers:
            x = layer(x)
        return x.pow(2).mean()


@needs_docs
@pytest.mark.filterwarnings("ignore:.*is deprecated")
def test_the_page_on_budgets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in one namespace; a file that it shows is there."""
    monkeypatch.chdir(tmp_path)
    pytest.importorskip("matplotlib")
    (written,) = blocks(BUDGET, "yaml")
    Path("plan.yaml").write_text(written)
    assert len(yaml.safe_load(written)["blocks"]) == 2
    names: dict[str, Any] = {"Model": Model, "batch": torch.ones(2, 8), "model": Model()}
    found = blocks(BUDGET, "python")
    assert len(found) >= 3
    for block in found:
        exec(compile(block, str(BUDGET), "exec"), names)
    assert Path("plans.png").stat().st_size > 1000
    assert [point.label for point in names["found"].budgets] == ["budget=60GiB", "budget=80GiB"]
    names["applied"].remove()


@needs_docs
def test_the_page_on_budgets_names_benchmarks_that_are_there() -> None:
    named = set(re.findall(r"--only (\w+)", BUDGET.read_text()))
    script = (ROOT / "benchmarks" / "budget.py").read_text()
    assert {"peaks", "hole"} <= named
    assert all(f'"{name}": ' in script for name in named)
