"""The callback in a Trainer: same training, fewer activations, and no trace afterwards."""

from __future__ import annotations

import copy
import logging
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.multiprocessing as mp
from helpers import DIM, MlpBlock, Stack, assert_same, executions, seed_all
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    Callback,
    EMAWeightAveraging,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lit_helpers import (
    LIGHTNING_WARNS,
    NAMES,
    LateLit,
    Lit,
    NormBlock,
    Recorder,
    SetupLit,
    assert_plain,
    join_pair,
    leftovers,
    loader,
    trainer_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import PartialCheckpoint

pytestmark = LIGHTNING_WARNS


def compare_fit(
    factory: Callable[[], L.LightningModule] = Lit,
    callbacks: Callable[[], list[Callback]] = list,
    every_n: int = 1,
    first: bool = True,
    counts: list[int] | None = None,
    **options: Any,
) -> tuple[Recorder, Recorder]:
    """Fit with and without `PartialCheckpoint` from one seed, and compare all that is left.

    Args:
        factory: makes the module.
        callbacks: makes the other callbacks of both fits.
        every_n: for `PartialCheckpoint`, which stands `first` or last in the list.
        counts: executions of the four blocks in each batch of the checkpointed fit.
    """
    records = []
    results = []
    for checkpointed in (True, False):
        seed_all(0)
        model, recorder, others = factory(), Recorder(), callbacks()
        ours: list[Callback] = [PartialCheckpoint(every_n=every_n)] if checkpointed else []
        listed = [*ours, *others] if first else [*others, *ours]
        trainer = trainer_of(*listed, recorder, **options)
        trainer.fit(model, loader(), loader(1))
        assert_plain(model)
        results.append(leftovers(model) | {"losses": recorder.losses, "keys": recorder.keys})
        records.append(recorder)
    assert_same(*results)
    expected = counts or [2 if i % every_n == 0 else 1 for i in range(4)]
    assert all(batch == expected for batch in records[0].batches)
    assert all(batch == [1] * 4 for batch in records[1].batches)
    assert records[0].batches
    return records[0], records[1]


# --- same training


@pytest.mark.parametrize("every_n", [1, 2, 9])
def test_fit(every_n: int) -> None:
    """Report H1, C1, D1: weights, buffers, optimizer, losses and keys as in plain training."""
    compare_fit(every_n=every_n)


@pytest.mark.parametrize("factory", [LateLit, SetupLit], ids=lambda f: f.__name__)
def test_blocks_that_are_made_later(factory: type[Lit]) -> None:
    """Report A11, I2: made in `LightningModule.setup` or `configure_model`."""
    compare_fit(factory)


@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"gradient_clip_val": 0.01},
        {"accumulate_grad_batches": 2},
        {"precision": "bf16-mixed", "gradient_clip_val": 0.01, "accumulate_grad_batches": 3},
        {"detect_anomaly": True},
        {"inference_mode": False},
        {"num_sanity_val_steps": 0, "limit_train_batches": 2},
    ],
    ids=str,
)
def test_trainer_options(options: dict[str, Any]) -> None:
    """Mixed precision, clipping, accumulation."""
    compare_fit(**options)


class RecyclingLit(Lit):
    """Three passes, the last with gradients."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index in range(3):
            with torch.set_grad_enabled(index == 2 and torch.is_grad_enabled()):
                y = self.net(x + y.detach().to(x.dtype))
        return y


def test_recycling_in_mixed_precision() -> None:
    """Report E1: no-grad passes before the real one, under bf16-mixed."""
    seed_all(0)
    states = []
    for callbacks in ([PartialCheckpoint()], []):
        seed_all(0)
        model = RecyclingLit(MlpBlock)
        trainer_of(*callbacks, precision="bf16-mixed").fit(model, loader())
        states.append(leftovers(model))
    assert_same(*states)


class EvalLit(Lit):
    """The blocks are in eval mode, as `from_pretrained` leaves them."""

    def __init__(self) -> None:
        super().__init__()
        self.net.layers.eval()


def test_blocks_kept_in_eval_mode() -> None:
    """Report I5, pitfall 13: Lightning keeps them so; they are recomputed all the same."""
    compare_fit(EvalLit)


class AdversarialLit(L.LightningModule):
    """Two nets, two optimizers, toggled by hand, with a detached fake."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = Stack(NormBlock, 2)
        self.net = Stack(SpectralBlock, 4)  # the critic; named so for `NAMES`

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(first)
        loss = -self.net(self.generator(batch)).mean()
        self.manual_backward(loss)
        first.step()
        first.zero_grad()
        self.untoggle_optimizer(first)

        self.toggle_optimizer(second)
        fake = self.generator(batch).detach()
        loss = self.net(fake).mean() - self.net(batch).mean()
        self.manual_backward(loss)
        second.step()
        second.zero_grad()
        self.untoggle_optimizer(second)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.net(batch)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=1e-2),
            torch.optim.SGD(self.net.parameters(), lr=1e-2),
        ]


class SpectralBlock(MlpBlock):
    """Spectral norm in a critic."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)


@pytest.mark.filterwarnings("ignore:.*optimizers:UserWarning")
def test_manual_optimization_with_two_optimizers() -> None:
    """Report F3, F5, A7: a GAN; same weights of both nets."""
    states = []
    counted = []
    for checkpointed in (True, False):
        seed_all(0)
        model = AdversarialLit()
        ours = [PartialCheckpoint(layers=[NormBlock, SpectralBlock])] if checkpointed else []
        with executions(model, ["generator.layers.0", "net.layers.0"]) as counts:
            trainer_of(*ours, num_sanity_val_steps=0).fit(model, loader())
        states.append(leftovers(model))
        counted.append(counts)
    assert_same(*states)
    assert all(counted[0][name] > counted[1][name] for name in counted[1])


class Thaw(BaseFinetuning):
    """The blocks are frozen in epoch 0 and train from epoch 1 on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.net.stem, pl_module.net.layers])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(
                [pl_module.net.stem, pl_module.net.layers], optimizer, train_bn=True
            )


class HeadLit(Lit):
    """The optimizer starts with what is trainable."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@pytest.mark.parametrize("first", [True, False])
def test_finetuning_that_thaws_the_blocks(first: bool) -> None:
    """Report F5, B2: frozen blocks run once, thawed ones twice."""
    states = []
    for checkpointed in (True, False):
        seed_all(0)
        model, recorder = HeadLit(MlpBlock), Recorder()
        ours = [PartialCheckpoint()] if checkpointed else []
        callbacks = [*ours, Thaw()] if first else [Thaw(), *ours]
        trainer_of(*callbacks, recorder).fit(model, loader())
        states.append(leftovers(model))
        runs = 2 if checkpointed else 1
        assert recorder.batches == [[1] * 4] * 3 + [[runs] * 4] * 3
    assert_same(*states)


@pytest.mark.parametrize("first", [True, False], ids=["ours first", "ours last"])
@pytest.mark.parametrize(
    "make",
    [
        lambda: EMAWeightAveraging(decay=0.5),
        WeightAveraging,
        lambda: StochasticWeightAveraging(swa_lrs=1e-2, swa_epoch_start=1),
    ],
    ids=["EMA", "mean", "SWA"],
)
@pytest.mark.filterwarnings("ignore:.*SWA")
def test_averaging_callbacks(make: Callable[[], Callback], first: bool) -> None:
    """Report H5: they deep-copy the module at setup and swap weights around validation."""
    states = []
    for checkpointed in (True, False):
        seed_all(0)
        model, recorder = Lit(MlpBlock), Recorder()
        ours: list[Callback] = [PartialCheckpoint()] if checkpointed else []
        listed = [*ours, make()] if first else [make(), *ours]
        trainer_of(*listed, recorder, max_epochs=3).fit(model, loader(), loader(1))
        assert_plain(model)
        states.append(leftovers(model))
        assert all(batch == [2 if checkpointed else 1] * 4 for batch in recorder.batches)
    assert_same(*states)


# --- life cycle


def test_idle_outside_of_fit() -> None:
    """Report I1, I6: validate, test and predict run each block once and swap nothing."""
    model, callback = Lit(), PartialCheckpoint()
    for verb in ("validate", "test", "predict"):
        with executions(model, NAMES) as counts:
            getattr(trainer_of(callback), verb)(model, loader(1), **_quiet(verb))
        assert [counts[name] for name in NAMES] == [1] * 4
        assert callback.handle is None
        assert_plain(model)


def _quiet(verb: str) -> dict[str, Any]:
    return {} if verb == "predict" else {"verbose": False}


def test_all_stages_in_one_process() -> None:
    """Report I1, I6: validate, fit, predict, fit again, a new trainer: applied once each time."""
    states = []
    for checkpointed in (True, False):
        seed_all(0)
        model, recorder = Lit(), Recorder()
        callback = PartialCheckpoint(every_n=2)
        callbacks = [callback] if checkpointed else []
        trainer = trainer_of(*callbacks, recorder, max_epochs=1)
        trainer.validate(model, loader(1), verbose=False)
        trainer.fit(model, loader(), loader(1))
        predictions = trainer.predict(model, loader(1))
        trainer.fit_loop.max_epochs = 2
        trainer.fit(model, loader(), loader(1))
        trainer_of(*callbacks, recorder, max_epochs=1).fit(model, loader(), loader(1))
        expected = [2, 1, 2, 1] if checkpointed else [1] * 4
        assert recorder.batches == [expected] * 9
        assert_plain(model)
        states.append(leftovers(model) | {"predictions": predictions})
    assert_same(*states)


def test_one_callback_object_for_two_modules() -> None:
    """Report I4: the second module is treated as well; so is the second one in one trainer."""
    callback = PartialCheckpoint()
    recorder = Recorder()
    trainer = trainer_of(callback, recorder, max_epochs=1)
    models = [Lit(), Lit(MlpBlock)]
    for model in models:
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(model, loader())
        assert_plain(model)
    assert recorder.batches == [[2] * 4] * 6


class Looking(Callback):
    """Keeps what the checkpoint callback shows while it is at work."""

    def __init__(self, callback: PartialCheckpoint) -> None:
        self.callback = callback
        self.plans: list[Any] = []

    def on_train_batch_start(self, *args: Any) -> None:
        assert self.callback.handle is not None
        self.plans.append(self.callback.handle.plan)


def test_handle_is_live_in_fit_only() -> None:
    """`.handle` shows the plan while it is in force."""
    callback = PartialCheckpoint(every_n=3)
    looking = Looking(callback)
    assert callback.handle is None
    trainer_of(callback, looking, max_epochs=1).fit(Lit(), loader())
    assert callback.handle is None
    assert [block.name for block in looking.plans[0]] == NAMES
    assert looking.plans[0].num_recomputed == 2


class FailingLit(Lit):
    """Raises in the given hook, or in the middle of a block."""

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(MlpBlock)
        self.where, self.error = where, error
        if where == "block":
            self.net.layers[2].up.register_forward_hook(self._raise)
        if where == "backward":
            self.net.layers[2].up.register_full_backward_hook(self._raise)

    def _raise(self, *args: Any) -> None:
        if self.trainer.training:
            raise self.error

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.where == "training_step" and batch_idx == 1:
            raise self.error
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        if self.where == "validation_step":
            raise self.error

    def setup(self, stage: str) -> None:
        if self.where == "setup":
            raise self.error

    def on_fit_start(self) -> None:
        if self.where == "on_fit_start":
            raise self.error

    def on_train_epoch_end(self) -> None:
        if self.where == "on_train_epoch_end":
            raise self.error

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.where == "configure_optimizers":
            raise self.error
        return super().configure_optimizers()


PLACES = [
    "setup",
    "configure_optimizers",
    "on_fit_start",
    "validation_step",
    "training_step",
    "block",
    "backward",
    "on_train_epoch_end",
]


@pytest.mark.parametrize(
    "error", [ValueError("boom"), KeyboardInterrupt()], ids=["error", "interrupt"]
)
@pytest.mark.parametrize("where", PLACES)
def test_class_is_restored_after_an_exception(where: str, error: BaseException) -> None:
    """Issue: Lightning calls no teardown after an exception or interrupt; ours removes anyway."""
    model, callback = FailingLit(where, error), PartialCheckpoint()
    with pytest.raises((ValueError, KeyboardInterrupt, SystemExit)):
        trainer_of(callback).fit(model, loader(), loader(1))
    assert callback.handle is None
    assert_plain(model)
    assert [type(layer) for layer in model.net.layers] == [MlpBlock] * 4
    model.where = "nowhere"
    model.net.layers[2].up._forward_hooks.clear()
    model.net.layers[2].up._backward_hooks.clear()
    model.net.layers[2].up._is_full_backward_hook = None
    recorder = Recorder()
    trainer_of(callback, recorder, max_epochs=1).fit(model, loader(), loader(1))
    assert recorder.batches == [[2] * 4] * 3


def test_fast_dev_run_and_barebones() -> None:
    """Debug modes of the trainer."""
    for options in ({"fast_dev_run": True}, {"barebones": True, "max_epochs": 1}):
        model = Lit()
        kwargs: dict[str, Any] = {"accelerator": "cpu", "devices": 1, **options}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            L.Trainer(callbacks=[PartialCheckpoint()], **kwargs).fit(model, loader())
        assert_plain(model)


# --- files


@pytest.mark.parametrize("then", ["with", "without"])
@pytest.mark.parametrize("before", ["with", "without"])
def test_resume(before: str, then: str, tmp_path: Path) -> None:
    """Report I3, I2: four combinations over a resume, with another every_n; equal to plain."""
    file = tmp_path / "run.ckpt"

    def run(first: list[Callback], second: list[Callback]) -> dict[str, Any]:
        seed_all(0)
        trainer = trainer_of(*first, max_epochs=1)
        trainer.fit(Lit(), loader())
        trainer.save_checkpoint(file)
        seed_all(1)
        model = Lit()
        trainer = trainer_of(*second, max_epochs=2)
        with warnings.catch_warnings():
            if first and not second:  # Lightning's general word on a callback that is gone
                warnings.filterwarnings("ignore", ".*callbacks used to create the checkpoint")
            trainer.fit(model, loader(), ckpt_path=file)
        return leftovers(model)

    ours = run(
        [PartialCheckpoint(every_n=2)] if before == "with" else [],
        [PartialCheckpoint(every_n=3)] if then == "with" else [],
    )
    assert_same(ours, run([], []))


def test_checkpoint_file_loads_strictly_into_a_plain_model(tmp_path: Path) -> None:
    """Report H1: keys of a file that is written in fit, here after each epoch."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    saver = ModelCheckpoint(dirpath=tmp_path, save_last=True)
    model = Lit()
    trainer_of(PartialCheckpoint(), saver, enable_checkpointing=True).fit(model, loader())
    content = torch.load(tmp_path / "last.ckpt", weights_only=True)
    twin = Lit()
    twin.load_state_dict(content["state_dict"], strict=True)
    assert_same(dict(twin.state_dict()), dict(model.state_dict()))
    loaded = Lit.load_from_checkpoint(tmp_path / "last.ckpt")
    assert_same(dict(loaded.state_dict()), dict(model.state_dict()))


def test_callback_and_module_pickle_before_and_after_fit() -> None:
    """Report A16: no closure on the callback nor on the module."""
    model, callback = Lit(), PartialCheckpoint(every_n=2, layers=["net.layers.*", NormBlock])
    pickle.loads(pickle.dumps((model, callback)))
    copy.deepcopy(callback)
    trainer_of(callback, max_epochs=1).fit(model, loader())
    model.trainer = None
    twin, other = pickle.loads(pickle.dumps((model, callback)))
    assert type(twin.net.layers[0]) is NormBlock
    assert other.handle is None


class CopyingLit(Lit):
    """Copies and pickles itself in the middle of fit, as loggers and averages do."""

    def on_train_batch_end(self, *args: Any) -> None:
        twin = copy.deepcopy(self.net)
        assert type(twin.layers[0]) is NormBlock
        assert type(pickle.loads(pickle.dumps(self.net)).layers[0]) is NormBlock


def test_copies_in_the_middle_of_fit() -> None:
    """Report H4, A16: a copy that is made in fit is plain."""
    compare_fit(CopyingLit)


# --- what it says


def test_summary_is_printed_once(capsys: pytest.CaptureFixture[str]) -> None:
    """How many of how many blocks, of which class, which ones; once per fit."""
    trainer = trainer_of(PartialCheckpoint(every_n=2), max_epochs=1)
    trainer.fit(Lit(), loader(), loader(1))
    out = capsys.readouterr().out
    assert re.search(r"2\s*(?:of|/)\s*4", out)
    assert out.count("NormBlock") == 1
    assert "net.layers" in out
    trainer.validate(Lit(), loader(1), verbose=False)
    assert not re.search(r"2\s*(?:of|/)\s*4", capsys.readouterr().out)


def test_summary_shows_the_notes(capsys: pytest.CaptureFixture[str]) -> None:
    """Where matches nest, the outermost counts and the summary says so."""
    callback = PartialCheckpoint(layers=["net.layers.*", "net.layers.*.up"])
    trainer_of(callback, max_epochs=1).fit(Lit(), loader())
    out = " ".join(capsys.readouterr().out.split())
    assert re.search(r"4\s*(?:of|/)\s*4", out)
    assert re.search(r"nest|outermost|inside", out)


@pytest.mark.parametrize("kind", [CSVLogger, TensorBoardLogger], ids=["csv", "tensorboard"])
def test_logger_metadata(kind: Any, tmp_path: Path) -> None:
    """`every_n` and the block names go into the logger's hyperparameters, beside the module's."""

    class Hyper(Lit):
        def __init__(self, width: int = 17) -> None:
            super().__init__()
            self.save_hyperparameters()

    logger = kind(tmp_path)
    trainer = trainer_of(
        PartialCheckpoint(every_n=2), max_epochs=1, logger=logger, log_every_n_steps=1
    )
    trainer.fit(Hyper(), loader())
    text = next(tmp_path.rglob("hparams.yaml")).read_text()
    assert "width" in text
    assert re.search(r"every_n\W+2", text)
    assert "net.layers.0" in text


def test_offload_on_a_cpu_says_once_that_there_is_nothing_to_move(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Semantics of offload: one word, and the run goes on, with the same result."""
    states = []
    seed_all(0)
    model = Lit()
    with warnings.catch_warnings(record=True) as warned, caplog.at_level(logging.INFO):
        warnings.simplefilter("always")
        trainer_of(PartialCheckpoint(offload=True)).fit(model, loader())
    states.append(leftovers(model))
    printed = capsys.readouterr()
    said = [str(w.message) for w in warned if "offload" in str(w.message)]
    said += [r.getMessage() for r in caplog.records if "offload" in r.getMessage()]
    said += re.findall(r"nothing to (?:move|offload)", " ".join(printed.out.split()))
    said += re.findall(r"nothing to (?:move|offload)", " ".join(printed.err.split()))
    assert len(said) == 1, said
    assert re.search(r"offload|host", printed.out), "the summary shows the target"
    seed_all(0)
    model = Lit()
    trainer_of().fit(model, loader())
    states.append(leftovers(model))
    assert_same(*states)


# --- refusals


BAD: list[tuple[str, Any]] = [
    *(("every_n", value) for value in (0, -1, 2.5, True, "2", None)),
    *(("offload", value) for value in ("yes", 1, None)),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=str)
def test_bad_arguments(name: str, value: Any) -> None:
    """Refused when the callback is made, long before the model is."""
    with pytest.raises((ValueError, TypeError), match=name) as caught:
        PartialCheckpoint(**{name: value})
    assert repr(value) in str(caught.value)


@pytest.mark.parametrize("factory", [Lit, LateLit, SetupLit], ids=lambda f: f.__name__)
def test_layers_that_match_nothing(factory: type[Lit]) -> None:
    """Report A13, pitfall 56: raised before the first step, also for blocks that are made later."""
    recorder = Recorder()
    model = factory()
    with pytest.raises((ValueError, MisconfigurationException), match="no_such_layer"):
        trainer_of(PartialCheckpoint(layers=["no_such_layer"]), recorder).fit(model, loader())
    assert recorder.batches == []
    assert_plain(model)


class BareLit(Lit):
    """Has no repeated blocks."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.net: Any = nn.Linear(DIM, DIM)


def test_nothing_to_checkpoint() -> None:
    """Pitfall 56: a model without blocks is an error that shows how to name them."""
    with pytest.raises((ValueError, MisconfigurationException), match="layers="):
        trainer_of(PartialCheckpoint()).fit(BareLit(), loader())


def test_two_callbacks_are_refused() -> None:
    """Two of ours in one trainer would contradict each other."""
    model = Lit()
    with pytest.raises((MisconfigurationException, ValueError), match="PartialCheckpoint"):
        trainer_of(PartialCheckpoint(), PartialCheckpoint(every_n=2)).fit(model, loader())
    assert_plain(model)


def test_strategy_that_checkpoints_already_is_refused() -> None:
    """Report A12: FSDP's `activation_checkpointing_policy` and ours would recompute twice."""
    trainer = trainer_of()
    strategy = FSDPStrategy(activation_checkpointing_policy={NormBlock})
    trainer._accelerator_connector.strategy = strategy
    model = Lit()
    with pytest.raises(
        (MisconfigurationException, ValueError), match="activation_checkpointing_policy"
    ):
        PartialCheckpoint().setup(trainer, model, "fit")
    assert_plain(model)


# --- several processes


class SkippingLit(Lit):
    """Skips a block in every second step; what is skipped differs by rank."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.net.stem(x)
        for index, layer in enumerate(self.net.layers):
            if index == 2 and self.trainer.training and (self.global_step + 1) % 2 == 0:
                continue
            x = layer(x)
        return self.net.head(x)


class TwiceLit(Lit):
    """Each block is used twice per step."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.net(x))


class SecondBackwardLit(Lit):
    """Manual optimization with two backward passes per step."""

    def __init__(self) -> None:
        super().__init__(MlpBlock)
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        for factor in (1.0, 0.5):
            optimizer.zero_grad()
            self.manual_backward(self(batch * factor).pow(2).mean())
            optimizer.step()


def _twice() -> Lit:
    return TwiceLit(MlpBlock)


DDP_CASES: dict[str, tuple[Callable[[], Lit], dict[str, Any], dict[str, Any]]] = {
    "default": (Lit, {}, {}),
    "find_unused_parameters": (SkippingLit, {"find_unused_parameters": True}, {}),
    "find_unused_parameters, all used": (Lit, {"find_unused_parameters": True}, {}),
    "static_graph": (Lit, {"static_graph": True}, {}),
    "static_graph, blocks used twice": (
        TwiceMlp := lambda: TwiceLit(MlpBlock),
        {"static_graph": True},
        {},
    ),
    "blocks used twice": (_twice, {}, {}),
    "accumulation": (Lit, {}, {"accumulate_grad_batches": 2}),
    "accumulation, find_unused_parameters": (
        SkippingLit,
        {"find_unused_parameters": True},
        {"accumulate_grad_batches": 3},
    ),
    "second backward": (SecondBackwardLit, {}, {}),
}


def _ddp_fit(case: str, checkpointed: bool, rank: int) -> tuple[dict[str, Any], list[int]]:
    factory, strategy, options = DDP_CASES[case]
    seed_all(0)
    model = factory()
    ours = [PartialCheckpoint(every_n=2)] if checkpointed else []
    trainer = trainer_of(
        *ours,
        max_epochs=1,
        devices=2,
        strategy=DDPStrategy(process_group_backend="gloo", **strategy),
        **options,
    )
    seed_all(10 + rank)  # dropout differs by rank
    with executions(model, NAMES) as counts:
        trainer.fit(model, loader(8))
    assert_plain(model)
    return leftovers(model), [counts[name] for name in NAMES]


def _ddp_worker(rank: int, folder: str) -> None:
    """One of two processes that runs all cases."""
    join_pair(rank, Path(folder, "store"), 60)
    outcome: dict[str, str] = {}
    for case in DDP_CASES:
        try:
            plain, plain_counts = _ddp_fit(case, False, rank)
            ours, counts = _ddp_fit(case, True, rank)
            assert_same(ours, plain)
            expected = [n * (2 if i % 2 == 0 else 1) for i, n in enumerate(plain_counts)]
            assert counts == expected, (counts, expected)
        except Exception as error:  # told to the parent, which fails the case
            outcome[case] = f"{type(error).__name__}: {error}"
    torch.save(outcome, f"{folder}/{rank}.pt")


@pytest.fixture(scope="module")
def ddp_outcome(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """Errors of each case, by rank; all cases in one pair of processes, since a start is slow."""
    folder = tmp_path_factory.mktemp("ddp")
    mp.spawn(_ddp_worker, (str(folder),), nprocs=2)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


@pytest.mark.parametrize("case", DDP_CASES)
def test_data_parallel(case: str, ddp_outcome: list[dict[str, str]]) -> None:
    """Report A1, A2, A3, A4, A7, pitfalls 17, 18: weights equal to plain DDP in two processes."""
    assert [outcome.get(case) for outcome in ddp_outcome] == [None, None]


class Asserting(Lit):
    """Checks in the spawned process that the blocks are recomputed."""

    counts: Counter[str]

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self._context = executions(self, NAMES)
        self.counts = self._context.__enter__()

    def on_train_batch_end(self, *args: Any) -> None:
        self._context.__exit__(None, None, None)
        del self._context
        if [self.counts[name] for name in NAMES] != [2, 1, 2, 1]:
            raise RuntimeError(f"not recomputed: {self.counts}")


@pytest.mark.filterwarnings("ignore")
def test_ddp_spawn() -> None:
    """Report A16: module and callback are pickled into two spawned processes."""
    seed_all(0)
    model = Asserting()
    before = copy.deepcopy(model.state_dict())
    trainer_of(PartialCheckpoint(every_n=2), devices=2, strategy="ddp_spawn", max_epochs=1).fit(
        model, loader()
    )
    assert_plain(model)
    assert not torch.equal(model.state_dict()["net.head.weight"], before["net.head.weight"])


class GrowingLit(Lit):
    """A block more in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.net.layers.append(NormBlock())


def test_blocks_that_come_with_a_later_epoch(tmp_path: Path) -> None:
    """Progressive growing: what is built in a later epoch is checkpointed from its first batch."""
    module = GrowingLit()
    callback = PartialCheckpoint()
    seen: list[int] = []

    class Look(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            assert callback.handle is not None
            seen.append(callback.handle.plan.num_recomputed)

    trainer = trainer_of(callback, Look(), limit_train_batches=1, default_root_dir=tmp_path)
    trainer.fit(module, DataLoader(torch.randn(4, DIM), batch_size=4))
    assert seen == [4, 5]
    assert {type(layer) for layer in module.net.layers} == {NormBlock}
