"""Fixtures for all tests: one thread, no distributed process left behind, no compiled code kept."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch


def _load_torchvision() -> None:
    """Its wheel has C++ operators that load beside the CUDA build of torch only, and it asks for
    two of them when it is imported (which Lightning does where it is installed). No test calls
    them, so their names will do."""
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        for operator in ("nms", "qnms"):
            torch.library.define(f"torchvision::{operator}", "(Tensor boxes) -> Tensor")


if find_spec("torchvision") is not None:
    _load_torchvision()


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    """More threads than free cores make tiny models slower and add nothing."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def gloo(tmp_path: Path) -> Iterator[None]:
    """A process group of this one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
