"""Overrides that make a run of the app small, and the types of the fixtures."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

ROOT = Path(__file__).parents[2]
TINY_NET = ["model.num_layers=3", "model.width=16", "model.num_heads=2"]
TINY_TEXT = ["data.sequence_length=16", "data.batch_size=2", "data.max_bytes=20000"]
SMOKE = ["trainer=smoke", "trainer.accelerator=cpu"]
TINY = [*SMOKE, *TINY_NET, *TINY_TEXT]

Compose = Callable[..., DictConfig]
RunCommand = Callable[..., "subprocess.CompletedProcess[str]"]
