"""Every way to run a training: the right figure or no figure, never a wrong one."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, LearningRateFinder
from lightning.pytorch.profilers import PyTorchProfiler
from lightning.pytorch.strategies import DDPStrategy
from monitor_helpers import (
    KIB,
    ROW,
    TRAINER_WARNS,
    Device,
    Net,
    Recorder,
    fit,
    fit_rows,
    num_modes,
    touch,
    trainer,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import OffloadConfig, PartialCheckpoint, PeakMemoryMonitor, monitor
from lightning_ckpt.core.memory.breakdown import KINDS
from lightning_ckpt.core.memory.device_steps import DeviceSteps
from lightning_ckpt.core.offload import Offloader
from lightning_ckpt.monitor import KEY

PARTS = (*KINDS, "activations", "other")

pytestmark = [
    *TRAINER_WARNS,
    pytest.mark.filterwarnings("ignore:.*overfit:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*training-dataloader-sampler:UserWarning"),
    pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning"),
]


@pytest.fixture(autouse=True)
def _nothing_left_on() -> Iterator[None]:
    yield
    assert num_modes() == 0
    assert not torch.autograd._profiler_enabled()


# The peak of `Net(extra=4096)` by hand: in forward, where the extra tensor is, there are the
# weight, its old gradient, two Adam states (256 KiB each) and the batch. Of the first step ever,
# there is neither a gradient nor a state.
STEADY = 4096 + 4 * 256 + 4
FIRST = 4096 + 256 + 4


def close(value: float) -> Any:
    return pytest.approx(value, abs=1)


# --- the parts


def test_parts_add_up_and_are_right(tmp_path: Path) -> None:
    for row in fit_rows(tmp_path, Net(extra=4096)):
        assert sum(row[part] for part in PARTS) == pytest.approx(row["peak_allocated"], abs=0.01)
        assert row["parameters"] == row["gradients"] == 256
        assert row["optimizer_states"] == close(512)
        assert row["buffers"] == 0
        assert row["activations"] == close(4)  # what `square` saves: the layer's output
        assert row["other"] == close(4096)


def test_figures_of_a_seed_are_the_same_in_two_runs(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        L.seed_everything(1, verbose=False)
        runs.append(fit_rows(tmp_path, Net(extra=64)))
    for first, second in zip(*runs, strict=True):
        del first["peak_host"], second["peak_host"]  # what the operating system does is not ours
        assert first == second


def test_without_breakdown(tmp_path: Path) -> None:
    row = fit_rows(tmp_path, Net(), PeakMemoryMonitor(breakdown=False))[-1]
    assert set(row) == {"peak_allocated", "val_peak_allocated", "peak_host", "offloaded"}


class Blocks(Net):
    """Eight blocks whose activations outweigh their inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(ROW, 4 * ROW), nn.GELU(), nn.Linear(4 * ROW, ROW))
            for _ in range(8)
        )
        self.batch_size = 64

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()


def test_what_every_n_bought_is_seen(tmp_path: Path) -> None:
    plain = fit_rows(tmp_path, Blocks(), limit_train_batches=2)[-1]
    plan = PartialCheckpoint(every_n=2, layers="blocks.*")
    peak = PeakMemoryMonitor()
    ours = fit_rows(tmp_path, Blocks(), peak, callbacks=[plan], limit_train_batches=2)[-1]
    # Of a block 64 x 1024 twice (before and after GELU) are saved, and its input.
    assert plain["activations"] - ours["activations"] == pytest.approx(4 * 2 * 256, rel=0.02)
    assert ours["peak_allocated"] < plain["peak_allocated"]
    assert peak.summary()[-1]["plan"] == "4 of 8 blocks recomputed"


def test_offloaded_bytes_are_those_of_one_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports: list[Any] = []
    make = Offloader.report
    monkeypatch.setattr(Offloader, "report", lambda self: reports.append(make(self)) or reports[-1])
    offload = OffloadConfig("disk", min_bytes=0, keep_last=0, directory=str(tmp_path))
    plan = PartialCheckpoint(offload=offload, layers="blocks.*")
    rows = fit_rows(tmp_path, Blocks(), callbacks=[plan], limit_val_batches=0)
    assert [row["offloaded"] for row in rows] == [8 * 64] * 2  # each block's input: 64 rows
    assert len(reports) == 1  # what is printed of the first step; the monitor asks for none


# --- ways to run


@pytest.mark.parametrize(
    "settings",
    [
        {"val_check_interval": 2},
        {"num_sanity_val_steps": 2},
        {"limit_val_batches": 0},
        {"limit_train_batches": 3},
        {"accumulate_grad_batches": 2},
        {"overfit_batches": 2},
        {"max_steps": 6, "max_epochs": -1},  # ends inside the second epoch
        {"profiler": "simple"},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=str,
)
def test_right_figure(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = Net(extra=4096)
    model.val_extra = 20_000
    assert fit(tmp_path, model, **settings) == [close(STEADY)] * 2


@pytest.mark.parametrize("settings", [{"fast_dev_run": True}, {"limit_train_batches": 1}], ids=str)
def test_single_step_has_the_figure_of_a_first_step(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    assert fit(tmp_path, Net(extra=4096), **settings)[0] == close(FIRST)


def test_validation_has_its_own_figure(tmp_path: Path) -> None:
    class Shrinks(Net):
        def on_validation_start(self) -> None:
            self.val_extra = (8192, 4096)[self.current_epoch]

    rows = fit_rows(tmp_path, Shrinks(extra=64))
    # The weight, its two states, the batch; Lightning clears gradients before it validates.
    expected = [close(extra + 3 * 256 + 4) for extra in (8192, 4096)]
    assert [row["val_peak_allocated"] for row in rows] == expected


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_host_memory_of_validation_is_left_out(tmp_path: Path) -> None:
    class Touches(Net):
        """Holds pages of the system for a moment."""

        in_training = 0
        in_validation = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            touch(self.in_training)
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            touch(self.in_validation)

    def peak_mib(**mib: int) -> float:
        model = Touches()
        vars(model).update(mib)
        return fit_rows(tmp_path, model)[-1]["peak_host"] * KIB

    before = peak_mib()
    assert peak_mib(in_validation=200) - before < 100
    assert peak_mib(in_training=200) - before > 100


def test_sanity_check_logs_nothing_and_validate_neither(tmp_path: Path) -> None:
    class Seen(Recorder):
        def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            assert trainer.sanity_checking or trainer.state.fn == "fit"
            if trainer.sanity_checking:
                assert not any(key.startswith("memory/") for key in trainer.callback_metrics)

    run = trainer(tmp_path, PeakMemoryMonitor(), Seen(), num_sanity_val_steps=2)
    run.fit(Net())
    alone = trainer(tmp_path, PeakMemoryMonitor())
    alone.validate(Net(), verbose=False)
    assert not any(key.startswith("memory/") for key in alone.callback_metrics)


def test_backward_by_hand_has_a_peak_and_no_activations(tmp_path: Path) -> None:
    """Lightning calls no hook there, so nobody knows when forward ended."""

    class ByHand(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers(use_pl_optimizer=False)
            optimizer.zero_grad()
            super().training_step(batch, batch_idx).backward()
            optimizer.step()

    model = ByHand(extra=4096)
    model.automatic_optimization = False
    for row in fit_rows(tmp_path, model, limit_val_batches=0):
        assert row["peak_allocated"] == close(STEADY - 256)  # gradients went before forward
        assert "activations" not in row
        assert sum(row.get(part, 0) for part in PARTS) == pytest.approx(row["peak_allocated"])


class HasSize(Net):
    """What `BatchSizeFinder` and `LearningRateFinder` turn."""

    def __init__(self) -> None:
        super().__init__(extra=4096)
        self.lr = 1e-4

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(torch.zeros(64, ROW), batch_size=self.batch_size)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*log_every_n_steps:UserWarning")
def test_finders_leave_no_trace(tmp_path: Path) -> None:
    size = BatchSizeFinder(steps_per_trial=1, init_val=2, max_trials=2)
    model = HasSize()
    seen = fit(tmp_path, model, callbacks=[size], limit_val_batches=0)
    assert model.batch_size in (4, 8)  # Lightning's versions differ in how often they try
    assert seen == [close(4096 + 4 * 256 + model.batch_size)] * 2
    rate = LearningRateFinder(num_training_steps=4, min_lr=1e-6, max_lr=1e-3)
    seen = fit(tmp_path, HasSize(), callbacks=[rate], limit_val_batches=0)
    assert seen == [close(4096 + 4 * 256 + 4)] * 2


def test_broken_epoch_has_no_figure(tmp_path: Path) -> None:
    class Breaks(Net):
        def on_train_epoch_start(self) -> None:
            self.fail_at = 2 if self.current_epoch == 1 else -1

    peak, recorder = PeakMemoryMonitor(), Recorder()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, peak, recorder, limit_val_batches=0).fit(Breaks(extra=4096))
    assert recorder.seen == [close(STEADY)]
    assert [row["epoch"] for row in peak.summary()] == [0]
    assert peak.summary()[0]["peak_allocated_MiB"] / KIB == close(STEADY)


# --- fewer epochs, fewer steps


def test_every_second_epoch(tmp_path: Path) -> None:
    peak = PeakMemoryMonitor(every_n_epochs=2)
    trainer(tmp_path, peak, max_epochs=4).fit(Net(extra=4096))
    assert [row["epoch"] for row in peak.summary()] == [0, 2]


class Modes(Net):
    """Which steps were followed."""

    def __init__(self) -> None:
        super().__init__(extra=4096)
        self.followed: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.followed.append(num_modes())
        return super().training_step(batch, batch_idx)


def test_first_steps_alone_have_the_steady_figure(tmp_path: Path) -> None:
    model = Modes()
    assert fit_rows(tmp_path, model, PeakMemoryMonitor(first_steps=1), limit_val_batches=0)[0][
        "peak_allocated"
    ] == close(STEADY)
    # The optimizer has no states before its first step.
    assert model.followed == [1, 1, 0, 0, 1, 0, 0, 0]


def test_first_steps_reach_an_update(tmp_path: Path) -> None:
    model = Modes()
    rows = fit_rows(
        tmp_path,
        model,
        PeakMemoryMonitor(first_steps=1),
        limit_val_batches=0,
        accumulate_grad_batches=2,
    )
    assert [row["peak_allocated"] for row in rows] == [close(STEADY)] * 2
    assert model.followed == [1, 1, 1, 1, 1, 1, 0, 0]


# --- others


class Resets(L.Callback):
    """Resets the device's counter wherever no step runs."""

    def __init__(self, device: Device) -> None:
        self.memory = device

    def on_train_batch_start(self, *_: Any) -> None:
        self.memory.reset_peak_memory_stats(None)

    on_train_batch_end = on_train_epoch_start = on_validation_end = on_train_batch_start


class OnDevice(Net):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.memory = device

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.memory.set((600, 500)[self.current_epoch] - 10 * batch_idx)
        self.memory.set(400)
        return super().training_step(batch, batch_idx)

    def on_after_backward(self) -> None:
        self.memory.set(100)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.memory.set(900)
        self.memory.set(100)


def on_device(
    monkeypatch: pytest.MonkeyPatch, path: Path, device: Device, *callbacks: L.Callback
) -> Recorder:
    device.set(100)
    monkeypatch.setattr(
        monitor, "step_source", lambda *_: DeviceSteps(torch.device("cuda"), device)
    )
    recorder = Recorder()
    trainer(path, *callbacks, recorder, val_check_interval=2).fit(OnDevice(device))
    return recorder


def test_resets_by_others_between_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    others = Resets(device)
    recorder = on_device(
        monkeypatch, tmp_path, device, PeakMemoryMonitor(), PeakMemoryMonitor(), others
    )
    assert recorder.seen == [600, 500]
    for row in recorder.rows:
        assert row["val_peak_allocated"] == 900
        assert row["activations"] == 300
        assert row["peak_reserved"] >= 2 * row["peak_allocated"]
        assert sum(row[part] for part in PARTS) == row["peak_allocated"]


def test_reset_inside_a_step_is_seen_and_there_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A callback that comes before the monitor resets before the step's peak was read."""
    device = Device()
    with pytest.warns(UserWarning, match=f"logs no {KEY}: something resets .* put it after"):
        recorder = on_device(monkeypatch, tmp_path, device, Resets(device), PeakMemoryMonitor())
    assert recorder.seen == [None, None]


# --- compiled code


def test_compiled_module_has_its_figure_from_allocation_events(tmp_path: Path) -> None:
    model = Net(extra=4096)
    model.layer.compile(backend="aot_eager")
    peak, recorder = PeakMemoryMonitor(), Recorder()
    trainer(tmp_path, peak, recorder).fit(model)
    assert recorder.seen == [pytest.approx(STEADY, rel=0.01)] * 2
    assert peak.source == "allocation events"
    assert {row["source"] for row in peak.summary()} == {"allocation events"}


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule:UserWarning")
def test_beside_lightnings_torch_profiler_compiled_code_has_no_figure(tmp_path: Path) -> None:
    model = Net()
    model.layer.compile(backend="eager")
    theirs = PyTorchProfiler(dirpath=tmp_path, filename="profile", export_to_chrome=False)
    peak, recorder = PeakMemoryMonitor(), Recorder()
    with pytest.warns(UserWarning, match=f"logs no {KEY}: torch's profiler is in use"):
        trainer(tmp_path, peak, recorder, profiler=theirs, limit_val_batches=0).fit(model)
    assert recorder.seen == [None, None]
    assert peak.source == "resident set"
    assert all(row["peak_host"] > 0 for row in recorder.rows)
    assert "aten::" in theirs.summary()
    del theirs


@pytest.mark.filterwarnings("ignore:The PyTorch Profiler default schedule:UserWarning")
def test_beside_lightnings_torch_profiler_eager_code_has_its_figure(tmp_path: Path) -> None:
    theirs = PyTorchProfiler(dirpath=tmp_path, filename="profile", export_to_chrome=False)
    seen = fit(tmp_path, Net(extra=4096), profiler=theirs, limit_val_batches=0)
    assert seen == [close(STEADY)] * 2


# --- ranks


class Uneven(Net):
    """Rank 1 holds more than rank 0 in the first epoch, rank 0 in the second."""

    def on_train_epoch_start(self) -> None:
        self.extra = 1024 + 4096 * (self.global_rank != self.current_epoch)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.extra == 1024:  # the lower peak, with more activations
            batch = batch.repeat(8, 1)
        return super().training_step(batch, batch_idx)


class Rows(L.Callback):
    """Each rank writes what `summary()` says."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        peak = next(c for c in trainer.callbacks if isinstance(c, PeakMemoryMonitor))  # type: ignore[attr-defined]
        path = Path(trainer.default_root_dir) / f"rank{trainer.global_rank}"
        path.write_text(json.dumps(peak.summary()))


def test_parts_and_number_of_the_rank_with_the_highest_peak(tmp_path: Path) -> None:
    strategy = DDPStrategy(start_method="fork")
    run = trainer(
        tmp_path, PeakMemoryMonitor(), Rows(), strategy=strategy, devices=2, limit_val_batches=0
    )
    run.fit(Uneven())
    first, second = (json.loads((tmp_path / f"rank{rank}").read_text()) for rank in range(2))
    assert [row["rank"] for row in first] == [1, 0]
    for row, other in zip(first, second, strict=True):
        del row["step_s"], other["step_s"]
        assert row == other
        total = sum(row[f"{part}_MiB"] for part in PARTS)
        assert total == pytest.approx(row["peak_allocated_MiB"])
        assert row["other_MiB"] / KIB >= 4096 + 1024


def test_resumed_epoch_has_only_its_own_steps(tmp_path: Path) -> None:
    class Shrinks(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.extra = 8192 if batch_idx < 3 else 4096
            return super().training_step(batch, batch_idx)

    from lightning.pytorch.callbacks import ModelCheckpoint

    save = ModelCheckpoint(tmp_path, filename="middle", every_n_train_steps=3)
    trainer(tmp_path, save, enable_checkpointing=True, max_epochs=1).fit(Shrinks())
    recorder = Recorder()
    resumed = trainer(tmp_path, PeakMemoryMonitor(), recorder, max_epochs=1, limit_val_batches=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed.fit(Shrinks(), ckpt_path=tmp_path / "middle.ckpt")
    # Of a fresh process: weight and states, no gradient.
    assert recorder.seen == [close(4096 + 3 * 256 + 4)]
