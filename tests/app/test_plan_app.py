"""`python examples/plan.py`, and a budget in `python examples/train.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from app_helpers import ROOT, TINY, TINY_NET, TINY_TEXT, Compose
from hydra.utils import instantiate

from lightning_ckpt import PartialCheckpoint
from lightning_ckpt.config import check


def test_the_command_prints_a_table_and_draws(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            str(ROOT / "examples" / "plan.py"),
            *TINY_NET,
            *TINY_TEXT,
            "budgets=[1GiB,1KiB]",
            f"picture={tmp_path}/plans.svg",
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    for expected in ("every_n=2", "planned", "budget=1GiB", "0 of 3", "needs"):
        assert expected in done.stdout
    assert (tmp_path / "plans.svg").stat().st_size > 1000


def test_the_group_has_a_budget(compose_app: Compose) -> None:
    config = compose_app("checkpoint=budget", "checkpoint.budget=3MiB", *TINY)
    check(config)
    callback = instantiate(config.checkpoint)
    assert isinstance(callback, PartialCheckpoint)
    assert callback.fit_plan.budget == "3MiB"
    config = compose_app("strategy=single_device", "strategy.budget=0.5", "strategy.every_n=1")
    check(config)
    assert instantiate(config.strategy).fit_plan.budget == 0.5


def test_the_group_has_a_plan(compose_app: Compose, tmp_path: Path) -> None:
    """Of itself, without another word about the interval that `partial` has."""
    file = tmp_path / "plan.yaml"
    file.write_text("blocks: [{name: blocks.0, action: recompute}]")
    config = compose_app("checkpoint=plan", f"checkpoint.plan={file}", *TINY)
    check(config)
    plan = instantiate(config.checkpoint).fit_plan.plan
    assert [block.name for block in plan] == ["blocks.0"]
    with pytest.raises(
        ValueError, match=r"^checkpoint\.plan is not given; say checkpoint\.plan=FILE"
    ):
        check(compose_app("checkpoint=plan", *TINY))
