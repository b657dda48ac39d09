"""`verify` on LightningModules, and on the first batch of a fit."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from helpers import DIM, MlpBlock, Stack, assert_same, batch, seed_all
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from monitor_helpers import Device, touch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

import lightning_ckpt.verifying as verifying
from lightning_ckpt import PartialCheckpoint, PeakMemoryMonitor, verify
from lightning_ckpt import monitor as monitor_module
from lightning_ckpt.core.memory.device_steps import DeviceSteps
from lightning_ckpt.core.swap import is_swapped

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning"),
]


class NormBlock(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(x))


class Calls:
    """State that the replay does not look into."""

    def __init__(self) -> None:
        self.number = 0


class HiddenCounter(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.calls = Calls()

    def forward(self, x: Tensor) -> Tensor:
        self.calls.number += 1
        return super().forward(x)


class Lit(L.LightningModule):
    """Logs, and keeps a metric."""

    def __init__(self, block: Callable[[], nn.Module] = NormBlock) -> None:
        super().__init__()
        self.net = Stack(block, 3)
        self.mean = MeanMetric()

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self.net(batch).pow(2).mean()
        self.mean(loss.detach())
        self.log("loss", loss)
        self.log_dict({"mean": self.mean, "batch": float(batch_idx)}, on_epoch=True)
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class PlainLit(Lit):
    """The other signature, and a tensor as result."""

    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return self.net(batch).pow(2).mean()


class ShortNameLit(Lit):
    """The trainer's loop goes by the place of the index, not by its name."""

    def training_step(self, batch: Tensor, i: int) -> Any:  # type: ignore[override]
        return super().training_step(batch, i)


class AnyArgumentsLit(Lit):
    def training_step(self, *args: Any) -> Any:  # type: ignore[override]
        batch, index = args
        return super().training_step(batch, index)


class ManualLit(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class IteratorLit(Lit):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.net(next(dataloader_iter)[0]).mean()


def loader() -> DataLoader[Tensor]:
    data = torch.randn(12, DIM, generator=torch.Generator().manual_seed(7))
    return DataLoader(data, batch_size=4)  # type: ignore[arg-type]


def fit(model: L.LightningModule, *callbacks: Callback, **options: Any) -> L.Trainer:
    quiet: dict[str, Any] = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    defaults = quiet | {"accelerator": "cpu", "max_epochs": 2}
    trainer = L.Trainer(callbacks=list(callbacks), **(defaults | options))
    trainer.fit(model, loader())
    return trainer


@pytest.fixture
def num_checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Gets an entry for each report that is made."""
    made: list[Any] = []
    plain = verifying.verify_step

    def counted(*args: Any, **kwargs: Any) -> Any:
        made.append(plain(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(verifying, "verify_step", counted)
    return made


@pytest.mark.parametrize("model", [Lit, PlainLit, ShortNameLit, AnyArgumentsLit])
def test_training_step(
    model: Callable[[], L.LightningModule], capsys: pytest.CaptureFixture
) -> None:
    """Without a trainer, where `log` would warn."""
    report = verify(model(), batch(0))
    assert report.ok, report.differences
    assert list(report.recomputes.values()) == [1, 1, 1]
    assert "the checkpointed step is the plain step" in capsys.readouterr().out


def test_nothing_is_printed_if_not_wanted(capsys: pytest.CaptureFixture) -> None:
    verify(Lit(), batch(0), show=False)
    assert capsys.readouterr().out == ""


def test_names_are_those_in_the_lightning_module() -> None:
    report = verify(Lit(HiddenCounter), batch(0))
    assert [d.name for d in report.differences] == [
        f"net.layers.{index}.calls.number" for index in range(3)
    ]
    assert [d.blocks for d in report.differences] == [(f"net.layers.{i}",) for i in range(3)]


@pytest.mark.parametrize(
    "options",
    [{}, {"precision": "bf16-mixed"}, {"precision": "bf16-true"}, {"accumulate_grad_batches": 2}],
    ids=str,
)
@pytest.mark.parametrize("every_n", [1, 2])
def test_training_goes_on_as_without(
    every_n: int, options: dict[str, Any], num_checks: list[Any]
) -> None:
    """Weights, optimizer, metrics and what was logged, over two epochs; one check."""
    left = []
    for callbacks in ([PartialCheckpoint(every_n, verify=True)], [PartialCheckpoint(every_n)], []):
        seed_all(0)
        model = Lit()
        trainer = fit(model, *callbacks, **options)
        logged = {key: value.clone() for key, value in trainer.callback_metrics.items()}
        left.append([dict(model.state_dict()), model.optimizers().state_dict(), logged])
        assert not any(map(is_swapped, model.modules()))
    assert_same(left[0], left[2])
    assert_same(left[1], left[2])
    assert [report.ok for report in num_checks] == [True]
    assert sum(num_checks[0].recomputes.values()) == (3 if every_n == 1 else 2)


def test_the_monitor_looks_away_in_either_order(tmp_path: Path) -> None:
    """Its figures, and the picture's step, are those of a training without `verify`."""
    rows, shapes = [], []
    for order in ("without", "monitor last", "monitor first"):
        seed_all(0)
        monitor = PeakMemoryMonitor(plot=True)
        callbacks = [PartialCheckpoint(verify=order != "without"), monitor]
        if order == "monitor first":
            callbacks.reverse()
        fit(Lit(), *callbacks, max_epochs=1, default_root_dir=tmp_path)
        (row,) = monitor.summary()
        assert row.pop("peak_host_MiB") > 0
        assert row.pop("step_s") > 0
        rows.append(row)
        timeline = monitor._one_step.timeline
        assert timeline is not None
        shapes.append([(span.kind, span.block) for span in timeline.blocks])
    assert rows[0]["peak_allocated_MiB"] > 0
    assert rows[0] == rows[1] == rows[2]
    assert len(shapes[0]) == 9  # three blocks: forward, recompute, backward
    assert shapes[0] == shapes[1] == shapes[2]


class Checked(Lit):
    """Knows when its step is only checked."""

    @property
    def is_check(self) -> bool:
        return "log" in vars(self)  # `verify` silences it


@pytest.mark.parametrize("is_first", [True, False])
def test_picture_of_a_first_step_has_no_check_in_it(is_first: bool, tmp_path: Path) -> None:
    hooks: list[tuple[bool, int]] = []

    class Hooked(Checked):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            hooks.append((self.is_check, len(self.net.layers[0]._forward_hooks)))
            return super().training_step(batch, batch_idx)

    monitor = PeakMemoryMonitor(plot=True)
    callbacks = [PartialCheckpoint(verify=True), monitor][:: -1 if is_first else 1]
    fit(Hooked(), *callbacks, max_steps=1, default_root_dir=tmp_path)
    timeline = monitor._one_step.timeline
    assert timeline is not None
    kinds = [span.kind for span in timeline.blocks]
    assert kinds.count("forward") == kinds.count("recompute") == 3
    assert [span.kind for span in timeline.phases] == ["forward", "backward", "optimizer"]
    assert set(hooks) == {(True, 0), (False, 1)}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_host_memory_of_the_check_is_left_out() -> None:
    class Touches(Checked):
        mib = 0

        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            touch(self.mib if self.is_check else 0)
            return super().training_step(batch, batch_idx)

    def peak_mib(mib: int) -> float:
        model, monitor = Touches(), PeakMemoryMonitor()
        model.mib = mib
        fit(model, monitor, PartialCheckpoint(verify=True), max_epochs=1)
        return monitor.summary()[0]["peak_host_MiB"]  # type: ignore[no-any-return]

    before = peak_mib(0)
    assert peak_mib(200) - before < 100


def test_device_counters_are_those_of_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check resets the device's counter, and its peak is none of the step's."""
    device = Device()

    class OnDevice(Checked):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            device.set(900 if self.is_check else 300)
            device.set(100)
            return super().training_step(batch, batch_idx)

    def source(*_: Any) -> DeviceSteps:
        return DeviceSteps(torch.device("cuda"), device)

    def resets(*args: Any, **kwargs: Any) -> Any:
        device.reset_peak_memory_stats(None)
        return plain(*args, **kwargs)

    plain = verifying.verify_step
    monkeypatch.setattr(verifying, "verify_step", resets)
    monkeypatch.setattr(monitor_module, "step_source", source)
    monitor = PeakMemoryMonitor()
    fit(OnDevice(), monitor, PartialCheckpoint(verify=True), max_epochs=1)
    (row,) = monitor.summary()
    assert row["peak_allocated_MiB"] * 1024 == 300


def test_in_each_fit(num_checks: list[Any]) -> None:
    callback = PartialCheckpoint(verify=True)
    for _ in range(2):
        fit(Lit(), callback)
    assert len(num_checks) == 2


def test_a_difference_ends_the_training() -> None:
    """Before the first step, and the model is plain again."""
    model = Lit(HiddenCounter)
    with pytest.raises(RuntimeError, match=r"verify: 3 values differ.*'net\.layers\.0\.calls\.num"):
        fit(model, PartialCheckpoint(verify=True))
    assert not any(map(is_swapped, model.modules()))
    assert [layer.calls.number for layer in model.net.layers] == [0, 0, 0]  # type: ignore[union-attr]


def test_blocks_kept_out_by_layers() -> None:
    """The way out that the error names."""
    model = Lit(NormBlock)
    model.net.layers[1] = HiddenCounter()
    fit(model, PartialCheckpoint(layers="NormBlock", verify=True))
    assert model.net.layers[1].calls.number == 6


def test_noise_of_plain_training_is_a_warning() -> None:
    calls: list[int] = []

    class Noisy(MlpBlock):
        def forward(self, x: Tensor) -> Tensor:
            calls.append(0)
            return super().forward(x) * len(calls)

    with pytest.warns(UserWarning, match=r"two plain steps.*begins in \('net\.layers\.0',\)"):
        fit(Lit(Noisy), PartialCheckpoint(verify=True))


def test_another_ranks_difference_ends_this_rank_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or it would wait for the other one for ever."""
    monkeypatch.setattr(verifying, "from_all_ranks", lambda trainer, lines: [lines, ["loss"]])
    with pytest.raises(RuntimeError, match=r"1 values differ.*\(rank 1\); the first: loss"):
        fit(Lit(), PartialCheckpoint(verify=True))


@pytest.mark.parametrize(
    ("model", "reason"), [(ManualLit, "optimizes by hand"), (IteratorLit, "takes a dataloader_it")]
)
def test_steps_that_cannot_be_run_by_themselves(
    model: Callable[[], L.LightningModule], reason: str
) -> None:
    """Refused before anything is trained; a loss of one's own is the way out."""
    with pytest.raises(MisconfigurationException, match=rf"verify: \w+Lit {reason}.*loss=lambda"):
        fit(model(), PartialCheckpoint(verify=True))
    with pytest.raises(MisconfigurationException, match=reason):
        verify(model(), batch(0))
    assert verify(model(), batch(0), loss=lambda m, x: m.net(x).mean()).ok


@pytest.mark.parametrize("strategy", [FSDPStrategy, ModelParallelStrategy])
def test_sharding_strategies_are_refused(strategy: Callable[[], Any]) -> None:
    trainer: Any = SimpleNamespace(strategy=strategy())
    with pytest.raises(MisconfigurationException, match=r"verify=True does not work with \w+Strat"):
        verifying.refuse_unverifiable(trainer, Lit())


def test_own_log_comes_back() -> None:
    """Some set `log` on the instance."""
    model, said = Lit(), []
    model.log = lambda *args, **kwargs: said.append(args)  # type: ignore[method-assign]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verify(model, batch(0), show=False)
    assert said == []
    model.log("loss", 1)
    assert said == [("loss", 1)]
    assert "log_dict" not in vars(model)


@pytest.mark.parametrize("value", ["yes", 1, None])
def test_verify_is_a_switch(value: Any) -> None:
    with pytest.raises(TypeError, match=f"verify must be True or False, got {value!r}"):
        PartialCheckpoint(verify=value)
