"""The epoch's peak as the logger and other callbacks see it, on a CPU and on a made-up device."""

from __future__ import annotations

import csv
import datetime
import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import DDPStrategy
from monitor_helpers import (
    ROW,
    TRAINER_WARNS,
    Device,
    Net,
    Recorder,
    Rows,
    fit,
    num_modes,
    trainer,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.data import DataLoader

from lightning_ckpt import PeakMemoryMonitor, monitor
from lightning_ckpt.core.memory.breakdown import PARTS, StepFigures
from lightning_ckpt.core.memory.device_steps import DeviceSteps
from lightning_ckpt.core.memory.peak import PeakUnavailable
from lightning_ckpt.core.memory.steps import StepSource
from lightning_ckpt.monitor import KEY

pytestmark = TRAINER_WARNS


@pytest.fixture(autouse=True)
def _nothing_left_on() -> Iterator[None]:
    yield
    assert num_modes() == 0
    assert not is_in_torch_dispatch_mode()


# --- the figure


def test_figure_by_hand(tmp_path: Path) -> None:
    """In the forward, where the extra tensor is made, there are the weight, its two Adam states and
    the batch; and the weight's gradient of the step before, since Lightning clears it after.
    """
    assert fit(tmp_path, Net(extra=4096)) == [pytest.approx(4096 + 4 * 256 + 4, abs=1)] * 2


def test_second_epoch_and_second_fit_are_the_same(tmp_path: Path) -> None:
    model = Net()
    first, second = fit(tmp_path, model, max_epochs=2)
    assert first == second
    again = fit(tmp_path, model, max_epochs=2)
    assert again[-1] == second


def test_one_monitor_serves_two_fits(tmp_path: Path) -> None:
    peak, recorder = PeakMemoryMonitor(), Recorder()
    for _ in range(2):
        trainer(tmp_path, peak, recorder, max_epochs=1).fit(Net())
    assert recorder.seen[0] == recorder.seen[1]
    assert recorder.seen[0]


def test_peak_is_reset_each_epoch(tmp_path: Path) -> None:
    class Shrinking(Net):
        def on_train_epoch_start(self) -> None:
            self.extra = (8192, 2048, 0)[self.current_epoch]

    high, middle, low = fit(tmp_path, Shrinking(), max_epochs=3)
    assert high is not None
    assert middle is not None
    assert low is not None
    assert high - middle == pytest.approx(8192 - 2048)
    assert 4 * 256 < low < middle


@pytest.mark.parametrize(
    "settings",
    [
        {"val_check_interval": 2},
        {"num_sanity_val_steps": 2},
        {"check_val_every_n_epoch": 2},
        {"limit_val_batches": 0},
    ],
    ids=str,
)
def test_validation_does_not_leak_in(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = Net()
    model.val_extra = 8192
    assert fit(tmp_path, model, **settings)[-1] == fit(tmp_path, limit_val_batches=0)[-1]


@pytest.mark.parametrize(
    "settings",
    [
        {"accumulate_grad_batches": 3},
        {"limit_train_batches": 2},
        {"max_steps": 6, "max_epochs": -1},
        {"fast_dev_run": True},
        {"precision": "bf16-mixed"},
        {"profiler": "simple"},
        {"detect_anomaly": True},
        {"gradient_clip_val": 0.5},
        {"overfit_batches": 1},
        {"reload_dataloaders_every_n_epochs": 1},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*overfit:UserWarning")
@pytest.mark.filterwarnings("ignore:.*training-dataloader-sampler:UserWarning")
@pytest.mark.filterwarnings("ignore:You requested to overfit:UserWarning")
def test_every_way_to_train_has_a_figure(tmp_path: Path, settings: dict[str, Any]) -> None:
    seen = fit(tmp_path, **settings)
    assert seen
    assert all(value is not None and 4 * 256 < value < 4096 for value in seen)


def test_manual_optimization(tmp_path: Path) -> None:
    class Manual(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            for _ in range(2):
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

    model = Manual(extra=4096)
    model.automatic_optimization = False
    assert fit(tmp_path, model) == [pytest.approx(4096 + 4 * 256 + 4, abs=300)] * 2


def test_no_training_batches_no_figure(tmp_path: Path) -> None:
    assert fit(tmp_path, limit_train_batches=0) == []


def test_skipped_epoch_has_no_figure(tmp_path: Path) -> None:
    class Skips(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.current_epoch == 0 else None

    first, second = fit(tmp_path, Skips())
    assert first is None
    assert second


def test_resume_counts_the_optimizer_states(tmp_path: Path) -> None:
    run = trainer(tmp_path, PeakMemoryMonitor(), max_epochs=1)
    run.fit(Net(extra=4096))
    run.save_checkpoint(tmp_path / "one.ckpt")
    recorder = Recorder()
    resumed = trainer(tmp_path, PeakMemoryMonitor(), recorder, max_epochs=2, limit_train_batches=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed.fit(Net(extra=4096), ckpt_path=tmp_path / "one.ckpt")
    # The only step after the resume: weight, states, no gradient yet.
    assert recorder.seen[-1] == pytest.approx(4096 + 3 * 256 + 4, abs=1)


def test_resume_inside_an_epoch(tmp_path: Path) -> None:
    """Lightning calls no `on_train_epoch_start` then; the states count from the first step on."""
    save = ModelCheckpoint(tmp_path, filename="middle", every_n_train_steps=3)
    trainer(tmp_path, save, enable_checkpointing=True, max_epochs=1).fit(Net())
    recorder = Recorder()
    resumed = trainer(tmp_path, PeakMemoryMonitor(), recorder, max_epochs=1, limit_val_batches=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        resumed.fit(Net(extra=4096), ckpt_path=tmp_path / "middle.ckpt")
    assert resumed.global_step == 4
    assert recorder.seen == [pytest.approx(4096 + 3 * 256 + 4, abs=1)]


def test_part_of_a_batch_that_no_operation_touches(tmp_path: Path) -> None:
    class Half(Net):
        def on_before_batch_transfer(self, batch: Tensor, dataloader_idx: int) -> Any:
            return {"x": batch, "unused": torch.empty(8192 * ROW)}

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            return super().training_step(batch["x"], batch_idx)

    first = fit(tmp_path, Half(), limit_val_batches=0)[0]
    assert first is not None
    assert first > 8192


# --- who gets it


def test_csv_has_one_row_per_epoch(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fit(tmp_path, logger=logger)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row[KEY]]
    assert [(row["epoch"], row["step"]) for row in rows] == [("0", "3"), ("1", "7")]
    assert all(float(row[KEY]) > 1 for row in rows)


def test_checkpoint_early_stopping_and_progress_bar_get_it(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, monitor=KEY, mode="min", save_on_train_epoch_end=True)
    stop = EarlyStopping(KEY, mode="min", patience=1, check_on_train_epoch_end=True)
    run = trainer(
        tmp_path,
        saved,
        PeakMemoryMonitor(),
        stop,
        enable_checkpointing=True,
        max_epochs=5,
        limit_val_batches=0,
    )
    run.fit(Net())
    assert float(saved.best_model_score) > 1
    assert run.current_epoch == 2  # equal figures are no improvement
    assert KEY in run.progress_bar_metrics


# --- it never gets in the way


def test_workers_are_not_under_the_mode(tmp_path: Path) -> None:
    class Workers(Net):
        def train_dataloader(self) -> DataLoader[Tensor]:
            return DataLoader(Rows(8), batch_size=4, num_workers=1, multiprocessing_context="fork")

    assert fit(tmp_path, Workers(), limit_val_batches=0)[-1]


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_mode_ends_with_an_exception(tmp_path: Path, error: type[BaseException]) -> None:
    class Failing(Net):
        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            assert num_modes() == 1
            raise error

    with pytest.raises((error, SystemExit)):
        trainer(tmp_path, PeakMemoryMonitor()).fit(Failing())
    assert num_modes() == 0


def test_two_monitors(tmp_path: Path) -> None:
    alone = fit(tmp_path)
    assert fit(tmp_path, callbacks=[PeakMemoryMonitor()]) == alone


def test_weights_are_those_of_a_run_without(tmp_path: Path) -> None:
    weights = []
    for callbacks in ([], [PeakMemoryMonitor()]):
        L.seed_everything(1, verbose=False)
        model = Net()
        trainer(tmp_path, *callbacks).fit(model)
        weights.append(model.layer.weight)
    assert torch.equal(*weights)


class Broken(StepSource):
    """Fails in one method, as a device that is lost would."""

    name = "broken"
    current_bytes = 0
    stopped = False

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    def _call(self, method: str) -> None:
        if method == self.method:
            raise RuntimeError("the device is lost")

    def reset(self) -> None:
        super().reset()
        self._call("reset")

    def begin(self, *_: Any) -> None:
        self._call("begin")

    def forward_ended(self) -> None:
        self._call("forward_ended")

    def backward_ended(self) -> None:
        self._call("backward_ended")

    def end(self) -> None:
        self._call("end")
        self.figures.add(StepFigures(2**20, dict.fromkeys(PARTS, 0)))

    def abandon(self) -> None:
        self._call("abandon")

    def stop(self) -> None:
        self.stopped = True
        self._call("stop")


METHODS = ["reset", "begin", "forward_ended", "backward_ended", "end", "abandon", "stop"]


@pytest.mark.parametrize("method", METHODS)
def test_failing_source_warns_once_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    broken = Broken(method)
    sources = iter([broken, Broken("none")])  # of training, of validation
    monkeypatch.setattr(monitor, "step_source", lambda device, *modules: next(sources))
    with pytest.warns(UserWarning, match="the device is lost") as caught:
        seen = fit(tmp_path)
    assert seen == ([1024, 1024] if method == "stop" else [None, None])
    assert len([w for w in caught if "the device is lost" in str(w.message)]) == 1
    assert broken.stopped


def test_device_without_a_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(device: torch.device, *modules: nn.Module) -> StepSource:
        raise PeakUnavailable("torch keeps no peak on it")

    monkeypatch.setattr(monitor, "step_source", unavailable)
    peak, recorder = PeakMemoryMonitor(), Recorder()
    with pytest.warns(UserWarning, match=f"logs no {KEY}: torch keeps no peak on it"):
        trainer(tmp_path, peak, recorder).fit(Net())
    # No key, not even with a zero.
    assert [set(row) for row in recorder.rows] == [{"peak_host", "offloaded"}] * 2
    assert peak.source == "resident set"


# --- a device


class OnDevice(Net):
    def __init__(self, device: Device) -> None:
        super().__init__()
        self.memory = device

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.memory.set((600, 500)[self.current_epoch])
        self.memory.set(100)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.memory.set(900)
        self.memory.set(100)


def test_device_peaks_of_each_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    device.set(5000)
    device.set(50)
    monkeypatch.setattr(
        monitor, "step_source", lambda *_: DeviceSteps(torch.device("cuda"), device)
    )
    assert fit(tmp_path, OnDevice(device), val_check_interval=2) == [600, 500]


def test_no_device_is_asked_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(*_: Any) -> int:
        raise AssertionError("a CPU run asked for the memory of a device")

    for name in ("memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, asked)
        monkeypatch.setattr(torch.accelerator, name, asked, raising=False)
    assert fit(tmp_path)[-1]


# --- ranks


class Uneven(Net):
    """Rank 1 holds more than rank 0."""

    def on_fit_start(self) -> None:
        self.extra = 1024 + 4096 * self.global_rank


class Writer(Recorder):
    """Each rank writes what it saw."""

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        path = Path(trainer.default_root_dir) / f"rank{trainer.global_rank}"
        path.write_text(json.dumps(self.seen))


class OneRankHasNone(PeakMemoryMonitor):
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        if trainer.global_rank == 0:
            self._steps.give_up("it broke")


def fit_two_ranks(path: Path, peak: PeakMemoryMonitor) -> list[list[float]]:
    """Run two processes, with a time limit: a rank that waits for the other would wait for ever."""
    strategy = DDPStrategy(start_method="fork", timeout=datetime.timedelta(seconds=20))
    run = trainer(path, peak, Writer(), strategy=strategy, devices=2, limit_val_batches=0)
    run.fit(Uneven())
    return [json.loads((path / f"rank{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("peak", [PeakMemoryMonitor, OneRankHasNone])
@pytest.mark.filterwarnings("ignore:.*it broke:UserWarning")
def test_larger_of_two_ranks_is_logged_on_both(
    tmp_path: Path, peak: type[PeakMemoryMonitor]
) -> None:
    first, second = fit_two_ranks(tmp_path, peak())
    assert first == second
    assert all(value > 1024 + 4096 for value in first)
