"""Fixtures for the Hydra app: its files, its configs, and runs small enough for a test."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from app_helpers import ROOT, Compose, RunCommand
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig


@pytest.fixture(autouse=True)
def _examples_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when `python examples/train.py` is run: the examples' folder comes first. The root comes
    last: Hydra finds `conf` from an imported `train`, and no installed package is hidden."""
    monkeypatch.setattr(sys, "path", [str(ROOT / "examples"), *sys.path, str(ROOT)])


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    """`hydra/job_logging=disabled` quiets all loggers of the process, for later tests too."""
    before, level = {name for name, log in _loggers() if log.disabled}, logging.root.level
    yield
    logging.root.setLevel(level)
    for name, log in _loggers():
        log.disabled = name in before


def _loggers() -> list[tuple[str, logging.Logger]]:
    known = logging.root.manager.loggerDict.items()
    return [(name, log) for name, log in known if isinstance(log, logging.Logger)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def compose_app(run_dir: Path) -> Iterator[Compose]:
    """The app's config with some overrides, as Hydra hands it to `main`."""
    import lightning_ckpt.config  # noqa: F401  registers the schemas

    def composed(*overrides: str) -> DictConfig:
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            config = compose(
                "train",
                overrides=[f"hydra.runtime.output_dir={run_dir}", *overrides],
                return_hydra_config=True,
            )
        HydraConfig.instance().set_config(config)
        return config

    yield composed
    GlobalHydra.instance().clear()
    HydraConfig.instance().cfg = None


@pytest.fixture
def run_command(tmp_path: Path) -> RunCommand:
    """`python examples/train.py ...` in an empty directory."""
    directory = tmp_path / "somewhere"
    directory.mkdir()

    def run(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, str(ROOT / "examples" / "train.py"), *arguments],
            cwd=directory,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"},
            capture_output=True,
            text=True,
            timeout=120,
            check=check,
        )

    return run
