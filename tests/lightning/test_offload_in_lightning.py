"""Offload under a trainer: weights of plain training, and the report of the first step."""

import gc
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from helpers import MlpBlock, Stack, assert_same, batch, seed_all
from lightning.pytorch.callbacks import Callback
from lit_helpers import (
    LIGHTNING_WARNS,
    Lit,
    leftovers,
    loader,
    trainer_of,
)
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_ckpt import (
    OffloadConfig,
    PartialCheckpoint,
    PartialCheckpointStrategy,
    PeakMemoryMonitor,
    apply_partial_checkpoint,
)

pytestmark = LIGHTNING_WARNS

DISK = OffloadConfig("disk", scope="all", min_bytes=0, keep_last=0)


def fitted(*callbacks: Callback, **values: Any) -> Any:
    seed_all(0)
    model = Lit()
    trainer_of(*callbacks, **values).fit(model, loader(), loader())
    return leftovers(model)


@pytest.mark.parametrize("way", ["callback", "strategy", "with the monitor"])
def test_weights_are_those_of_plain_training(way: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = fitted()
    capsys.readouterr()
    if way == "strategy":
        ours = fitted(strategy=PartialCheckpointStrategy(every_n=2, offload=DISK))
    else:
        others = [PeakMemoryMonitor()] if way == "with the monitor" else []
        ours = fitted(PartialCheckpoint(every_n=2, offload=DISK), *others)
    assert_same(ours, plain)
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("Offload, first step:") == 1
    assert "MiB moved to disk" in text
    assert "the peak" in text
    assert "disk" in text.partition("Offload, first step")[0], "the table says where"


class Growth(Callback):
    """What there is of ours after each epoch and its validation, and the bytes on disk."""

    def __init__(self, adapter: PartialCheckpoint) -> None:
        self._adapter = adapter
        self.seen: list[tuple[Counter[str], int]] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        handle = self._adapter.fit_plan.handle
        assert handle is not None
        assert handle.offloader is not None
        handle.offloader.settle()
        gc.collect()
        ours = (type(each) for each in gc.get_objects())
        kinds = Counter(
            k.__qualname__ for k in ours if str(k.__module__).startswith("lightning_ckpt")
        )
        self.seen.append((kinds, handle.offloader.report().taken_bytes))


def test_nothing_grows_over_epochs_and_validation() -> None:
    adapter = PartialCheckpoint(offload=DISK)
    growth = Growth(adapter)
    fitted(adapter, growth, max_epochs=20)
    early, late = growth.seen[4], growth.seen[-1]
    assert len(growth.seen) == 20
    assert early[1] > 0
    assert late == early


class Failing(Callback):
    def on_after_backward(self, *args: Any) -> None:
        raise ValueError("in between")


def test_an_exception_in_the_first_step_prints_no_report(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(ValueError, match="in between"):
        fitted(PartialCheckpoint(offload=DISK), Failing())
    assert "first step" not in capsys.readouterr().out


def test_offload_that_moves_nothing_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    fitted(PartialCheckpoint(offload="disk"))  # every tensor here is below min_bytes
    assert "nothing was moved" in " ".join(capsys.readouterr().out.split())


def test_a_full_disk_ends_the_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_space(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", no_space)
    config = OffloadConfig("disk", directory=str(tmp_path), min_bytes=0, keep_last=0)
    seed_all(0)
    model = Lit()
    kinds = [type(module) for module in model.modules()]
    with pytest.raises(OSError, match=f"could not write .* bytes .* in {tmp_path}"):
        trainer_of(PartialCheckpoint(offload=config)).fit(model, loader())
    assert [type(module) for module in model.modules()] == kinds


# --- several processes


def _gradients(model: nn.Module, rank: int, offload: bool, wrap: Any) -> list[Tensor]:
    handle = apply_partial_checkpoint(model, 2, offload=DISK) if offload else None
    wrapped = wrap(model)
    for index in range(3):
        loss = wrapped(batch(2 * index + rank)).pow(2).mean()
        if handle is not None:
            assert handle.offloader is not None
            handle.offloader.settle()
        loss.backward()
    if handle is not None and handle.offloader is not None:
        assert handle.offloader.report().in_bytes > 0
    grads = [p.grad for p in model.parameters()]
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]  # type: ignore[union-attr,misc]


def _sharded(model: Any) -> nn.Module:
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def _work(rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    dist.device_mesh.init_device_mesh("cpu", (2,))
    for wrap in (DistributedDataParallel, _sharded):
        found = []
        for offload in (False, True):
            torch.manual_seed(0)
            model = Stack(lambda: MlpBlock(dropout=0.0), num_blocks=4)
            found.append(_gradients(model, rank, offload, wrap))
        assert all(map(torch.equal, *found)), f"{wrap} on rank {rank}"
    dist.destroy_process_group()


def test_ddp_and_fsdp2(tmp_path: Path) -> None:
    mp.spawn(_work, args=(str(tmp_path / "store"),), nprocs=2)
