"""Habits of Lightning's users beside a strategy: tuners, a strategy used again, blocks that come
late; and the engines for which there is no strategy of ours."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import DIM, MlpBlock, Stack, assert_same, seed_all
from lightning.pytorch.accelerators import CPUAccelerator, XLAAccelerator
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    Callback,
    EMAWeightAveraging,
    LearningRateFinder,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lit_helpers import (
    LIGHTNING_WARNS,
    Lit,
    NormBlock,
    Recorder,
    assert_plain,
    leftovers,
    loader,
    trainer_of,
)
from test_partial_checkpoint import AdversarialLit, GrowingLit, SpectralBlock
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ckpt import PartialCheckpoint, PartialCheckpointStrategy
from lightning_ckpt.fitting import FitPlan

pytestmark = LIGHTNING_WARNS

Run = Callable[[Any], Any]


def compare_runs(run: Run, **words: Any) -> None:
    """What `run` returns is the same with our strategy and with Lightning's."""
    results = []
    for strategy in (PartialCheckpointStrategy(**words), SingleDeviceStrategy()):
        seed_all(0)
        results.append(run(strategy))
    assert_same(*results)


def counts_of(strategy: Any, every_n: int = 2) -> list[int]:
    """Executions of the four blocks in a batch."""
    ours = isinstance(strategy, PartialCheckpointStrategy)
    return [2 if ours and index % every_n == 0 else 1 for index in range(4)]


# --- callbacks and plugins


class TunableLit(Lit):
    """Has the attributes that the tuners change."""

    def __init__(self) -> None:
        super().__init__(MlpBlock)
        self.lr, self.batch_size = 1e-3, 2

    def train_dataloader(self) -> DataLoader[Tensor]:
        data = torch.randn(64, DIM, generator=torch.Generator().manual_seed(7))
        return DataLoader(data, batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> DataLoader[Tensor]:
        return loader(1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if len(batch) > 16:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


CALLBACKS: dict[str, Callable[[], Callback]] = {
    "learning rate finder": lambda: LearningRateFinder(num_training_steps=20),
    "batch size finder": lambda: BatchSizeFinder(steps_per_trial=1),
    "EMA": lambda: EMAWeightAveraging(decay=0.5),
    "SWA": lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
    "pruning": lambda: ModelPruning("l1_unstructured", amount=0.3),
}


@pytest.mark.filterwarnings("ignore:.*SWA")
@pytest.mark.filterwarnings("ignore:`weights_only` was not set")
@pytest.mark.parametrize("name", CALLBACKS)
def test_callbacks(name: str, tmp_path: Path) -> None:
    """Tuners run a fit within the fit, save and restore; averages copy; pruning reparametrizes."""

    def run(strategy: Any) -> dict[str, Any]:
        model, recorder = TunableLit(), Recorder()
        trainer = trainer_of(
            CALLBACKS[name](), recorder, strategy=strategy, max_epochs=3, default_root_dir=tmp_path
        )
        trainer.fit(model)
        assert_plain(model)
        assert recorder.batches
        assert all(batch == counts_of(strategy) for batch in recorder.batches)
        return leftovers(model) | {"found": (model.lr, model.batch_size)}

    compare_runs(run, every_n=2)


@pytest.mark.parametrize(
    "make",
    [
        lambda: MixedPrecision("bf16-mixed", "cpu"),
        lambda: HalfPrecision("bf16-true"),
        DoublePrecision,
    ],
    ids=["mixed", "half", "double"],
)
def test_precision_plugins(make: Callable[[], Any]) -> None:
    def run(strategy: Any) -> dict[str, Any]:
        model = Lit()
        trainer_of(strategy=strategy, plugins=[make()], max_epochs=1).fit(model, loader())
        return leftovers(model)

    compare_runs(run, every_n=2)


@pytest.mark.filterwarnings("ignore:.*optimizers:UserWarning")
def test_manual_optimization_with_two_optimizers() -> None:
    """Report F3, F5: a GAN."""

    def run(strategy: Any) -> dict[str, Any]:
        model = AdversarialLit()
        trainer_of(strategy=strategy, num_sanity_val_steps=0).fit(model, loader())
        return leftovers(model)

    compare_runs(run, layers=[NormBlock, SpectralBlock])


class ClosureLit(Lit):
    """Its optimizer runs forward and backward several times in a step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


def test_optimizer_that_calls_its_closure_again() -> None:
    def run(strategy: Any) -> dict[str, Any]:
        model = ClosureLit(MlpBlock)
        trainer_of(strategy=strategy, max_epochs=1).fit(model, loader())
        return dict(model.state_dict())

    compare_runs(run)


# --- one object, used again


@pytest.mark.parametrize("fails", [False, True], ids=["after a fit", "after an exception"])
def test_one_strategy_for_two_trainers(fails: bool) -> None:
    """Each of them checkpoints; nothing of the first is left."""
    strategy = PartialCheckpointStrategy(every_n=2)
    first, second, recorder = Lit(), Lit(), Recorder()
    trainer = trainer_of(strategy=strategy, accelerator="auto")
    if fails:
        first.configure_optimizers = lambda: 1 / 0  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(ZeroDivisionError):
            trainer.fit(first, loader())
    else:
        trainer.fit(first, loader())
    assert_plain(first)
    trainer_of(recorder, strategy=strategy, accelerator="auto").fit(second, loader())
    assert recorder.batches == [[2, 1, 2, 1]] * 6
    assert_plain(second)


class ShardedModelLit(Lit):
    """The blocks are made in the hook that came before `configure_model`."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.net: Any = None

    def configure_sharded_model(self) -> None:
        if self.net is None:
            self.net = Stack(NormBlock, 4)


@pytest.mark.filterwarnings("ignore:You have overridden .*configure_sharded_model")
def test_configure_sharded_model() -> None:
    def run(strategy: Any) -> dict[str, Any]:
        model, recorder = ShardedModelLit(), Recorder()
        trainer_of(recorder, strategy=strategy).fit(model, loader())
        assert recorder.batches == [counts_of(strategy)] * 6
        return leftovers(model)

    compare_runs(run, every_n=2)


class PlanWatcher(Callback):
    """How many blocks are recomputed, at the end of each batch."""

    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.seen.append(trainer.strategy.handle.plan.num_recomputed)


def test_blocks_that_come_with_a_later_epoch() -> None:
    """As with the callback; looked for at set-up, in each epoch, and again where they changed."""
    asked: list[str] = []

    def is_block(name: str, module: Any) -> bool:
        asked.append(name)
        return isinstance(module, NormBlock)

    model, watcher = GrowingLit(), PlanWatcher()
    strategy = PartialCheckpointStrategy(layers=is_block)
    trainer_of(watcher, strategy=strategy, limit_train_batches=2).fit(model, loader())
    assert watcher.seen == [4, 4, 5, 5]
    assert asked.count("net.layers.0") == 4
    assert {type(layer) for layer in model.net.layers} == {NormBlock}


def test_blocks_are_looked_for_once_at_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The user's predicate is asked once for each module, and once in each epoch."""
    asked: list[str] = []

    def is_block(name: str, module: Any) -> bool:
        asked.append(name)
        return isinstance(module, NormBlock)

    model, plan = Lit(), FitPlan(1, False, is_block)
    assert plan.apply(model)
    assert sorted(asked) == sorted({name for name, m in model.named_modules() if m is not model})
    assert not plan.apply(model)
    plan.remove()
    assert_plain(model)


# --- engines without a strategy of ours


@pytest.mark.parametrize("adapter", ["callback", "strategy"])
def test_xla_is_refused(adapter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch cannot checkpoint there; one that can is let through."""
    ours: Any = PartialCheckpoint() if adapter == "callback" else None
    strategy = "auto" if ours else PartialCheckpointStrategy()
    trainer = trainer_of(*([ours] if ours else []), strategy=strategy, accelerator="auto")
    model = Lit()
    monkeypatch.setattr(L.Trainer, "accelerator", XLAAccelerator.__new__(XLAAccelerator))
    with pytest.raises(MisconfigurationException, match=r"XLA.*torch_xla\.utils\.checkpoint"):
        trainer.fit(model, loader())
    assert_plain(model)
    monkeypatch.setattr(torch, "xla", object(), raising=False)
    trainer.fit(model, loader())


def deepspeed_strategy(config: Any) -> DeepSpeedStrategy:
    """One that needs no package."""
    strategy = DeepSpeedStrategy.__new__(DeepSpeedStrategy)
    strategy.config, strategy.accelerator = config, CPUAccelerator()
    return strategy


@pytest.mark.parametrize("flag", ["cpu_checkpointing", "partition_activations"])
def test_deepspeed_flags_without_effect_are_named(flag: str) -> None:
    """Pitfall 56: nothing in the model calls DeepSpeed's checkpointing."""
    trainer = trainer_of()
    model, callback = Lit(), PartialCheckpoint()
    flags = {"cpu_checkpointing": False, "partition_activations": False, flag: True}
    trainer._accelerator_connector.strategy = deepspeed_strategy(
        {"activation_checkpointing": flags}
    )
    with pytest.warns(UserWarning, match=rf"DeepSpeedStrategy has {flag} set.*offload=True"):
        callback.setup(trainer, model, "fit")
    callback.teardown(trainer, model, "fit")
    assert_plain(model)


@pytest.mark.parametrize("config", [None, {}, {"activation_checkpointing": {}}], ids=str)
def test_deepspeed_without_flags_is_fine(config: Any) -> None:
    trainer = trainer_of()
    model, callback = Lit(), PartialCheckpoint()
    trainer._accelerator_connector.strategy = deepspeed_strategy(config)
    callback.setup(trainer, model, "fit")
    callback.teardown(trainer, model, "fit")


class AdapterLit(Lit):
    """Two blocks are frozen, and a layer in the others."""

    def __init__(self, frozen: bool) -> None:
        super().__init__(MlpBlock)
        if frozen:
            self.net.layers[1:3].requires_grad_(False)
            for layer in self.net.layers:
                layer.up.requires_grad_(False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def cpu_deepspeed(stage: int) -> DeepSpeedStrategy:
    """Lightning's strategy wants CUDA, DeepSpeed does not."""
    import deepspeed

    class OnCPU(DeepSpeedStrategy):
        def setup_environment(self) -> None:
            self.set_world_ranks()
            deepspeed.init_distributed("gloo")

    strategy = OnCPU(stage=stage, parallel_devices=[torch.device("cpu", 0)], logging_level=40)
    strategy.config["zero_force_ds_cpu_optimizer"] = False  # type: ignore[index]
    return strategy


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen part"])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_callback_under_deepspeed(
    stage: int, frozen: bool, gloo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report A10, pitfall 23: same losses, blocks 0 and 2 run twice."""
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    pytest.importorskip("deepspeed")
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    seed_all(0)
    first, results = AdapterLit(frozen), []
    for ours in ([PartialCheckpoint(every_n=2)], []):
        seed_all(1)
        recorder = Recorder()
        trainer = trainer_of(*ours, recorder, strategy=cpu_deepspeed(stage), max_epochs=1)
        trainer.fit(copy.deepcopy(first), loader(5))
        results.append(recorder.losses)
        again = [2, 1, 2, 1] if ours else [1] * 4
        assert recorder.batches == [again] * 5
    assert_same(*results)
