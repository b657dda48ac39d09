"""`python examples/plan.py`, and a budget in `python examples/train.py`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
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
            "may_offload=disk",
            f"picture={tmp_path}/pictures/plans.svg",
        ],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    path = tmp_path / "pictures" / "plans.svg"
    for expected in ("every_n=2", "planned", "budget=1GiB", "needs", f"Picture: {path}"):
        assert expected in done.stdout
    assert path.stat().st_size > 1000


@pytest.mark.parametrize("command", ["plan", "train"])
def test_no_key_of_a_command_is_called_as_a_group(command: str) -> None:
    """Hydra would take `key=value` for a choice in the group, so the key could not be given."""
    conf = ROOT / "conf"
    config = yaml.safe_load((conf / f"{command}.yaml").read_text())
    chosen = {group for entry in config["defaults"] if isinstance(entry, dict) for group in entry}
    groups = {path.name for path in conf.iterdir() if path.is_dir()}
    assert chosen <= groups
    assert not groups & config.keys()


def test_the_group_has_a_budget(compose_app: Compose) -> None:
    config = compose_app("checkpoint=budget", "checkpoint.budget=3MiB", *TINY)
    check(config)
    callback = instantiate(config.checkpoint)
    assert isinstance(callback, PartialCheckpoint)
    assert callback.fit_plan.budget == "3MiB"
    config = compose_app("strategy=single_device", "strategy.budget=5MiB", "strategy.every_n=1")
    check(config)
    assert instantiate(config.strategy).fit_plan.budget == "5MiB"


@pytest.mark.parametrize("budget", ["auto", 0.9])
@pytest.mark.parametrize("group", ["checkpoint=budget checkpoint", "strategy=ddp strategy"])
def test_a_cpu_needs_bytes(compose_app: Compose, group: str, budget: Any) -> None:
    """Said before anything is built: the group's own word is `auto`."""
    choice, key = group.split()
    words = [choice, f"{key}.budget={budget}", f"{key}.every_n=1", *TINY]
    cpu, cuda = (compose_app(*words, f"trainer.accelerator={kind}") for kind in ("cpu", "cuda"))
    with pytest.raises(ValueError, match=rf"^{key}\.budget=.*this is cpu; give bytes"):
        check(cpu)
    check(cuda)
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="give bytes"):
            check(compose_app(*words, "trainer.accelerator=auto"))


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
