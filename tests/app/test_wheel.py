"""The configs ship inside the wheel, and another Hydra app reaches them through `pkg://`."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from app_helpers import ROOT

OFFLINE = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]

APP = """
import hydra
from hydra.utils import instantiate

import lightning_ckpt


@hydra.main(version_base="1.3", config_path=".", config_name="app")
def main(config):
    print(lightning_ckpt.__file__)
    print(type(instantiate(config.checkpoint)).__name__, config.checkpoint.every_n)
    print(*(type(instantiate(node)).__name__ for node in config.callbacks.values()))
    print(*(type(instantiate(node)).__name__ for node in config.logger.values()))


main()
"""

CONFIG = """
defaults:
  - checkpoint: partial
  - callbacks: [peak_memory, model_checkpoint]
  - logger: csv
  - _self_

hydra:
  searchpath:
    - pkg://lightning_ckpt.conf
"""


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the wheel would put into site-packages."""
    pytest.importorskip("hatchling", reason="builds a wheel without a network")
    directory = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", *OFFLINE, "-w", str(directory), str(ROOT)],
        check=True,
    )
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


def test_wheel_holds_each_config(unpacked: Path) -> None:
    shipped = unpacked / "lightning_ckpt" / "conf"
    for path in (ROOT / "conf").rglob("*.yaml"):
        assert (shipped / path.relative_to(ROOT / "conf")).read_text() == path.read_text()


def test_another_app_uses_the_groups(unpacked: Path, tmp_path: Path) -> None:
    (tmp_path / "app.py").write_text(APP)
    (tmp_path / "app.yaml").write_text(CONFIG)
    run = subprocess.run(
        [sys.executable, "app.py", "checkpoint.every_n=3"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    file, checkpoint, callbacks, logger = run.stdout.splitlines()
    assert Path(file).is_relative_to(unpacked)
    assert checkpoint == "PartialCheckpoint 3"
    assert callbacks == "PeakMemoryMonitor ModelCheckpoint"
    assert logger == "CSVLogger"
    assert "Warning" not in run.stderr
