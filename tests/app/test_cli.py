"""LightningCLI: each way in which its users write a strategy or a callback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from app_helpers import ROOT

import lightning_ckpt

pytest.importorskip("jsonargparse")

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

QUIET = {
    "accelerator": "cpu",
    "devices": "1",
    "logger": "false",
    "enable_checkpointing": "false",
    "enable_progress_bar": "false",
    "enable_model_summary": "false",
    "max_epochs": "1",
    "limit_train_batches": "2",
    "limit_val_batches": "1",
}
SMALL = {"model.num_layers": "4", "model.width": "16", "data.sequence_length": "16"}
TINY = [
    *(f"--trainer.{key}={value}" for key, value in QUIET.items()),
    *(f"--{key}={value}" for key, value in SMALL.items()),
    "--data.max_bytes=20000",
    "--seed_everything=1",
]


Fit = Callable[..., Any]


@pytest.fixture
def fit(monkeypatch: pytest.MonkeyPatch) -> Fit:
    """`cli.py fit ...` in this process; gives the trainer."""

    def run(*arguments: str) -> Any:
        import cli

        # Lightning reads signatures in a way that jsonargparse calls outdated.
        monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        monkeypatch.setattr(sys, "argv", ["cli.py", "fit", *TINY, *arguments])
        return cli.main().trainer

    return run


def test_strategy_by_name(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    trainer = fit("--trainer.strategy", "partial_checkpoint")
    assert type(trainer.strategy) is lightning_ckpt.PartialCheckpointStrategy
    assert "4 of 4" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        "--trainer.strategy lightning_ckpt.PartialCheckpointStrategy --trainer.strategy.every_n 4",
        "--trainer.strategy.class_path lightning_ckpt.PartialCheckpointStrategy "
        "--trainer.strategy.init_args.every_n 4",
        "--trainer.strategy PartialCheckpointStrategy --trainer.strategy.layers blocks.[1-3] "
        "--trainer.strategy.every_n 4",
        "--trainer.callbacks+=lightning_ckpt.PartialCheckpoint --trainer.callbacks.every_n=4",
    ],
)
def test_arguments(words: str, fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    fit(*words.split())
    assert ("1 of 3" if "layers" in words else "1 of 4") in capsys.readouterr().out


@pytest.mark.parametrize(
    ("kind", "its_own"),
    [
        ("PartialCheckpointStrategy", "checkpoint_io"),
        ("PartialCheckpointDDPStrategy", "start_method"),
        ("PartialCheckpointFSDPStrategy", "sharding_strategy"),
        ("PartialCheckpointModelParallelStrategy", "save_distributed_checkpoint"),
    ],
)
def test_configuration_lists_all_arguments(
    kind: str, its_own: str, fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours, and those of Lightning's class."""
    with pytest.raises(SystemExit, match="0"):
        fit("--trainer.strategy.class_path", f"lightning_ckpt.{kind}", "--print_config")
    text = capsys.readouterr().out
    assert f"class_path: lightning_ckpt.{kind}" in text
    for name in ("every_n: 1", "offload: false", "layers: null", its_own):
        assert f"      {name}" in text


def test_bad_value(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trainer.strategy", "lightning_ckpt.PartialCheckpointStrategy"]
    with pytest.raises(SystemExit, match="2"):
        fit(*words, "--trainer.strategy.every_n", "two")
    assert "every_n" in capsys.readouterr().err


def test_command_on_two_devices(tmp_path: Path) -> None:
    """Lightning starts the second process from the same command line."""
    words = ["--trainer.strategy", "partial_checkpoint_ddp", "--trainer.devices", "2"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "cli.py"), "fit", *TINY, *words],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("4 of 4 blocks") == 1  # the first rank tells it
    assert "MEMBER: 2/2" in done.stderr
