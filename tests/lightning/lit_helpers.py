"""What the tests in a Trainer share: toy modules, what they leave behind, a quiet trainer."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from helpers import DIM, MlpBlock, Stack, executions
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

# What Lightning says of toy modules, and what its own dependencies say.
LIGHTNING_WARNS = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:Found .* in eval mode at the start of training"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]

NAMES = [f"net.layers.{i}" for i in range(4)]


# --- toy modules


class NormBlock(MlpBlock):
    """Dropout and BatchNorm in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Lit(L.LightningModule):
    """Four blocks in `net`; every loop has its step."""

    def __init__(self, block: Callable[[], nn.Module] = NormBlock) -> None:
        super().__init__()
        self.net = Stack(block, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch).pow(2).mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self(batch)

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class LateLit(Lit):
    """The blocks are made in `configure_model`."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.net: Any = None

    def configure_model(self) -> None:
        if self.net is None:
            self.net = Stack(NormBlock, 4)


class SetupLit(Lit):
    """The blocks are made in `setup`."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.net: Any = None

    def setup(self, stage: str) -> None:
        if self.net is None:
            self.net = Stack(NormBlock, 4)


class Recorder(Callback):
    """Counts how often each block runs in each batch, and what can be seen of the model in fit."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.keys: list[list[str]] = []
        self.losses: list[Tensor] = []

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        self._context = executions(pl_module, NAMES)
        self._counts = self._context.__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._context.__exit__(None, None, None)
        self.batches.append([self._counts[name] for name in NAMES])
        self.keys.append([*pl_module.state_dict(), *(n for n, _ in pl_module.named_modules())])
        if outputs:
            self.losses.append(outputs["loss"].detach().clone())


def loader(num_batches: int = 3) -> DataLoader[Tensor]:
    """The same batches of four rows in the same order."""
    data = torch.randn(4 * num_batches, DIM, generator=torch.Generator().manual_seed(7))
    return DataLoader(data, batch_size=4)  # type: ignore[arg-type]


def trainer_of(*callbacks: Callback, **options: Any) -> L.Trainer:
    """A quiet trainer on the CPU."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(callbacks=list(callbacks), **(defaults | options))


def leftovers(model: nn.Module) -> dict[str, Any]:
    """Parameters, buffers, optimizer states and classes after a fit."""
    optimizers = model.optimizers() if isinstance(model, L.LightningModule) else []
    optimizers = optimizers if isinstance(optimizers, list) else [optimizers]
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "optimizers": [o.state_dict() for o in optimizers],
        "types": [type(m).__name__ for m in model.modules()],
        "plain": all("forward" not in vars(m) for m in model.modules()),
    }


def assert_plain(model: nn.Module) -> None:
    """Each block has exactly its own class again."""
    for module in model.modules():
        assert type(module).__module__ != "lightning_ckpt.core.swap"
    if isinstance(model, Lit) and model.net is not None:
        assert {type(layer) for layer in model.net.layers} <= {NormBlock, MlpBlock}


def join_pair(rank: int, store: Path, seconds: float) -> None:
    """Be one of two processes, as torchrun would start them; they meet in a file, at no port."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the plans' tables
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=2,
        timeout=timedelta(seconds=seconds),
    )
