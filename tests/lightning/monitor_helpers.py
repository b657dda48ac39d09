"""A module of one weight, a quiet trainer, and what a callback sees at each epoch's end."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lit_helpers import trainer_of
from pretended import Counters
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_ckpt import PeakMemoryMonitor
from lightning_ckpt.monitor import KEY

# What Lightning says of toy modules and of forks, and what its own dependencies say.
TRAINER_WARNS = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:GPU available but not used:UserWarning"),
]

KIB = 1 / 1024  # MiB
ROW = 256  # float32 in a KiB


def num_modes() -> int:
    return torch._C._len_torch_dispatch_stack()


class Rows(Dataset[Tensor]):
    """Rows of 1 KiB; says in its data whether it was made under a dispatch mode."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((ROW,), float(num_modes()))


class Net(L.LightningModule):
    """One weight of 256 KiB. `extra` are KiB that each training step holds for a moment."""

    def __init__(self, extra: int = 0, batch_size: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(ROW, ROW, bias=False)
        self.extra = extra
        self.batch_size = batch_size
        self.fail_at = -1
        self.val_extra = 0

    def loader(self) -> DataLoader[Tensor]:
        return DataLoader(Rows(4 * self.batch_size), batch_size=self.batch_size)

    train_dataloader = loader
    val_dataloader = loader

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        assert batch.max() == 0, "the loader ran under the mode"
        torch.ones(self.extra * ROW)
        if batch_idx == self.fail_at:
            raise ZeroDivisionError
        return self.layer(batch).square().mean()

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert batch.max() == 0, "the loader ran under the mode"
        torch.ones(self.val_extra * ROW)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-4)


class Recorder(L.Callback):
    """What a callback that comes after the monitor sees at each epoch's end, in KiB."""

    def __init__(self) -> None:
        self.seen: list[float | None] = []  # the peaks
        self.rows: list[dict[str, float]] = []  # all figures, without "memory/" and "_MiB"

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        value = trainer.callback_metrics.get(KEY)
        self.seen.append(None if value is None else float(value) / KIB)
        self.rows.append(
            {
                key.removeprefix("memory/").removesuffix("_MiB"): float(value) / KIB
                for key, value in trainer.callback_metrics.items()
                if key.startswith("memory/")
            }
        )


def trainer(path: Path, *callbacks: L.Callback, **settings: Any) -> L.Trainer:
    defaults: dict[str, Any] = {"log_every_n_steps": 1, "default_root_dir": path}
    return trainer_of(*callbacks, **(defaults | settings))


def fit(path: Path, model: L.LightningModule | None = None, **settings: Any) -> list[float | None]:
    recorder = Recorder()
    callbacks = [PeakMemoryMonitor(), *settings.pop("callbacks", []), recorder]
    trainer(path, *callbacks, **settings).fit(model or Net())
    return recorder.seen


def fit_rows(
    path: Path, model: L.LightningModule, peak: PeakMemoryMonitor | None = None, **settings: Any
) -> list[dict[str, float]]:
    """All figures of each epoch, in KiB."""
    recorder = Recorder()
    callbacks = [peak or PeakMemoryMonitor(), *settings.pop("callbacks", []), recorder]
    trainer(path, *callbacks, **settings).fit(model)
    return recorder.rows


def touch(num_mib: int) -> None:
    """Hold pages of the system for a moment."""
    with mmap.mmap(-1, max(num_mib, 1) * 2**20) as pages:
        for start in range(0, len(pages), 4096):
            pages[start] = 1


class Device(Counters):
    """An allocator's counters, set in KiB."""

    def set(self, *lives: int) -> None:
        super().set(*(1024 * live for live in lives))
