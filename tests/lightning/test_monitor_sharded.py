"""Sharded training on two processes: a rank's figures are of what it holds itself."""

from __future__ import annotations

import json
import logging
import os
import sys
import warnings
from datetime import timedelta
from functools import partial
from pathlib import Path

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.pytorch.strategies import ModelParallelStrategy
from monitor_helpers import ROW, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import PeakMemoryMonitor

BLOCKS = 4
STRATEGIES = {
    "fsdp2": partial(ModelParallelStrategy, data_parallel_size=2, tensor_parallel_size=1),
}


class Sharded(L.LightningModule):
    """Four weights of 256 KiB, half of each on a rank."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(ROW, ROW, bias=False) for _ in range(BLOCKS))

    def configure_model(self) -> None:
        from torch.distributed.fsdp import fully_shard

        mesh = self.device_mesh["data_parallel"]
        for block in self.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(self, mesh=mesh)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch).sin()
        return batch.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), foreach=False)

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(32, ROW), batch_size=4)  # type: ignore[arg-type]


def _worker(rank: int, folder: str) -> None:
    """One of two processes, as torchrun would start them; they meet in a file, at no port."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ |= {"LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "OMP_NUM_THREADS": "1"}
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115  the table
    store, limit = f"file://{folder}/store", timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=limit)
    for name, strategy in STRATEGIES.items():
        peak = PeakMemoryMonitor()
        trainer(Path(folder), peak, strategy=strategy(), devices=2).fit(Sharded())
        Path(folder, f"{name}{rank}").write_text(json.dumps(peak.summary()))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sharded")
    mp.spawn(_worker, (str(folder),), nprocs=2)
    return folder


@pytest.mark.parametrize("name", STRATEGIES)
def test_parts_are_of_the_local_shard(outcomes: Path, name: str) -> None:
    first, second = (json.loads((outcomes / f"{name}{rank}").read_text()) for rank in range(2))
    assert len(first) == len(second) == 2
    for row, other in zip(first, second, strict=True):
        assert row["peak_allocated_MiB"] == other["peak_allocated_MiB"]
        half = BLOCKS * 256 / 1024 / 2
        assert row["parameters_MiB"] == half
        assert row["optimizer_states_MiB"] == pytest.approx(2 * half, abs=0.001)
        assert row["gradients_MiB"] <= half
        assert row["source"] == "live tensors"
