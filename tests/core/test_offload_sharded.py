"""Parameters that a sharding strategy exchanges around each call of a block."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core.offload import OffloadConfig


class Scaled(nn.Module):
    """Saves its parameter for backward as `data`, so nothing but the storage tells."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:  # (4, 32)
        return x * x * self.scale.data + self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.usefixtures("gloo")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
def test_the_parameters_that_stand_in_for_the_shards_stay(tmp_path: Path) -> None:
    """FSDP2 frees their storages after each call, while a copy could still read them."""
    model = Model()
    mesh = init_device_mesh("cpu", (1,))
    config = OffloadConfig("disk", "kept", str(tmp_path), min_bytes=0, keep_last=0)
    with apply_partial_checkpoint(model, 9, offload=config, layers="Scaled") as handle:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(torch.ones(4, 32, requires_grad=True)).sum().backward()
        assert handle.offloader is not None
        report = handle.offloader.report()
        num_kept = len(handle.plan) - handle.plan.num_recomputed
    assert report.stayed_bytes == {"a parameter": num_kept * 32 * 4}
    assert report.out_bytes == num_kept * 4 * 32 * 4  # x
