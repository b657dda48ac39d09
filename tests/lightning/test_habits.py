"""Training habits: what people put around a fit changes nothing of what it leaves behind.

Mixed precision, clipping, accumulation, averaging, finetuning, manual optimization, resuming,
spawned processes and `torch.compile` have their tests beside those of the callback and of the
strategies; here are the others.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from helpers import DIM, MlpBlock, Stack, assert_same, batch, compare, executions, seed_all
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    BatchSizeFinder,
    Callback,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateFinder,
    LearningRateMonitor,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lit_helpers import LIGHTNING_WARNS
from test_partial_checkpoint import (
    NAMES,
    Lit,
    NormBlock,
    assert_plain,
    compare_fit,
    leftovers,
    loader,
    trainer_of,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import PartialCheckpoint, apply_partial_checkpoint

pytestmark = LIGHTNING_WARNS


def fit_both(
    factory: Callable[[], L.LightningModule],
    run: Callable[[L.LightningModule, list[Callback]], Any],
) -> list[L.LightningModule]:
    """`run` a checkpointed and a plain module from one seed and hold what is left of both, and what
    `run` returns, against each other; returns the modules."""
    results, models = [], []
    for callbacks in ([PartialCheckpoint()], []):
        seed_all(0)
        model = factory()
        value = run(model, list(callbacks))
        assert_plain(model)
        results.append(leftovers(model) | {"value": value})
        models.append(model)
    assert_same(*results)
    return models


# --- callbacks and options of the trainer


@pytest.mark.parametrize(
    "callbacks",
    [
        lambda: [Timer(duration="00:01:00:00")],
        lambda: [EarlyStopping("loss", patience=5)],
        lambda: [GradientAccumulationScheduler({0: 1, 1: 3})],
        lambda: [ModelPruning("l1_unstructured", amount=0.3, parameters_to_prune=None)],
    ],
    ids=["Timer", "EarlyStopping", "GradientAccumulationScheduler", "ModelPruning"],
)
def test_callbacks(callbacks: Callable[[], list[Callback]]) -> None:
    compare_fit(LoggingLit, callbacks=callbacks)


class LoggingLit(Lit):
    """Has a loss to stop by, and a learning rate to find."""

    def __init__(self, lr: float = 1e-2) -> None:
        super().__init__(MlpBlock)
        self.lr = lr

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@pytest.mark.parametrize(
    "options",
    [
        {"overfit_batches": 1},
        {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        {"val_check_interval": 1},
        {"max_epochs": -1, "max_steps": 5},
        {"reload_dataloaders_every_n_epochs": 1},
        {"use_distributed_sampler": False},
    ],
    ids=str,
)
@pytest.mark.filterwarnings("ignore:.*overfit")
def test_options(options: dict[str, Any]) -> None:
    compare_fit(**options)


@pytest.mark.parametrize(
    "profiler", [SimpleProfiler, AdvancedProfiler, PyTorchProfiler], ids=lambda p: p.__name__
)
def test_profilers(profiler: Callable[..., Any], tmp_path: Path) -> None:
    def run(model: L.LightningModule, callbacks: list[Callback]) -> None:
        made = profiler(dirpath=tmp_path, filename="profile")
        trainer_of(*callbacks, profiler=made, max_epochs=1).fit(model, loader(12))

    fit_both(Lit, run)


def test_learning_rate_finder(tmp_path: Path) -> None:
    """It trains, puts everything back, and trains."""

    def run(model: L.LightningModule, callbacks: list[Callback]) -> Any:
        finder = LearningRateFinder(num_training_steps=6)
        trainer = trainer_of(*callbacks, finder, default_root_dir=tmp_path, log_every_n_steps=1)
        trainer.fit(model, loader(8))
        assert finder.optimal_lr is not None
        return finder.optimal_lr.results, model.lr

    fit_both(LoggingLit, run)


class Sized(Lit):
    """Its loader has the batch size that a finder asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        data = torch.randn(32, DIM, generator=torch.Generator().manual_seed(7))
        return DataLoader(data, batch_size=self.batch_size)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def test_batch_size_finder(tmp_path: Path) -> None:
    def run(model: L.LightningModule, callbacks: list[Callback]) -> Any:
        finder = BatchSizeFinder(steps_per_trial=2, max_trials=2, init_val=2)
        trainer_of(*callbacks, finder, default_root_dir=tmp_path).fit(model)
        return model.batch_size

    assert fit_both(Sized, run)[0].batch_size > 2


class Failing(Callback):
    """Ends the training in its second epoch."""

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.current_epoch == 1 and batch_idx == 1:
            raise RuntimeError("power cut")


@pytest.mark.filterwarnings("ignore:.*was called without a model")
@pytest.mark.filterwarnings("ignore:.*there is no last checkpoint available")
def test_checkpoint_on_an_exception(tmp_path: Path) -> None:
    """It is that of plain training, and loads strictly; the order of the callbacks is free."""
    states = []
    for index, first in enumerate((True, False, None)):
        seed_all(0)
        saver = OnExceptionCheckpoint(tmp_path / str(index))
        ours = [] if first is None else [PartialCheckpoint()]
        listed = [*ours, saver] if first else [saver, *ours]
        model = Lit()
        with pytest.raises(RuntimeError, match="power cut"):
            trainer_of(*listed, Failing(), enable_checkpointing=True).fit(model, loader())
        assert_plain(model)
        found = torch.load(saver.ckpt_path, weights_only=False)
        Lit().load_state_dict(found["state_dict"])
        states.append([found["state_dict"], found["optimizer_states"]])
    assert_same(states[0], states[2])
    assert_same(states[1], states[2])


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.filterwarnings("ignore:You're resuming from a checkpoint that ended before")
def test_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    """With and without the callback, from files that were made with and without it."""
    ends = []
    for index, (before, after) in enumerate(((True, True), (True, False), (False, True), (0, 0))):
        seed_all(0)
        saver = ModelCheckpoint(tmp_path / str(index), every_n_train_steps=4, save_top_k=-1)
        ours = [PartialCheckpoint(every_n=2)] if before else []
        trainer_of(*ours, saver, enable_checkpointing=True).fit(Lit(), loader())
        file = next((tmp_path / str(index)).glob("*step=4.ckpt"))
        seed_all(1)
        model = Lit()
        again = [PartialCheckpoint()] if after else []
        trainer_of(*again).fit(model, loader(), ckpt_path=file, weights_only=False)
        ends.append(leftovers(model))
    for end in ends[:3]:
        assert_same(end, ends[3])


def test_loggers_see_the_same(tmp_path: Path) -> None:
    def run(model: L.LightningModule, callbacks: list[Callback]) -> Any:
        logger = CSVLogger(tmp_path, name=str(len(callbacks)))
        options = {"logger": logger, "log_every_n_steps": 1}
        trainer_of(*callbacks, LearningRateMonitor(), **options).fit(model, loader())
        return (Path(logger.log_dir) / "metrics.csv").read_text()

    fit_both(LoggingLit, run)


class WithBackbone(Lit):
    """What `BackboneFinetuning` looks for."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = self.net.layers

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.net.head.parameters(), lr=1e-2)


@pytest.mark.filterwarnings("ignore:.*BatchNorm")
def test_backbone_finetuning() -> None:
    """The blocks are frozen in the first epoch, and thaw in the second."""

    def run(model: L.LightningModule, callbacks: list[Callback]) -> Any:
        thaw = BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=1e-3)
        trainer_of(*callbacks, thaw, max_epochs=3).fit(model, loader())

    ours, _ = fit_both(WithBackbone, run)
    assert any(p.requires_grad for p in ours.backbone.parameters())


# --- adapters


class Adapted(Lit):
    """PEFT's LoRA on the first linear layer of each block; everything else is frozen."""

    def __init__(self) -> None:
        super().__init__(MlpBlock)
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=["up"], lora_dropout=0.1)
        self.net = peft.get_peft_model(self.net, config)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


def test_lora() -> None:
    """Every adapter learns."""

    def run(model: L.LightningModule, callbacks: list[Callback]) -> Any:
        before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        trainer_of(*callbacks).fit(model, loader())
        moved = [n for n, p in model.named_parameters() if n in before and (p != before[n]).any()]
        assert moved == list(before)
        return moved

    fit_both(Adapted, run)


# --- what stands in the blocks


class WeightNormBlock(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(self.up)


class SpectralBlock(MlpBlock):
    """Its vectors move at every call."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.parametrizations.spectral_norm(self.up)


class PrunedBlock(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.prune.l1_unstructured(self.up, "weight", 0.5)


class _KeepOnContext(torch.autograd.Function):
    """Keeps tensors as attributes of `ctx`, past the saved-tensor hooks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.x, ctx.scale = x, scale
        return torch.tanh(x) * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        slope = 1 - torch.tanh(ctx.x).pow(2)
        return grad * slope * ctx.scale, (grad * torch.tanh(ctx.x)).sum(0)


class ContextBlock(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_KeepOnContext.apply(x, self.scale))


class _QuantizedProduct(torch.autograd.Function):
    """As the libraries for 8-bit training do it: backward goes through the dequantized weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale)
        return x @ (codes.to(x.dtype) * scale).T + bias

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        codes, scale = ctx.saved_tensors
        return grad @ (codes.to(grad.dtype) * scale), None, None, grad.sum(0)


class QuantizedLinear(nn.Module):
    """Whole numbers that are not trained, and a bias that is."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        weight = torch.randn(outside, inside)
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.codes = nn.Parameter((weight / scale).round().to(torch.int8), requires_grad=False)
        self.register_buffer("scale", scale)
        self.bias = nn.Parameter(torch.zeros(outside))

    def forward(self, x: Tensor) -> Tensor:
        return _QuantizedProduct.apply(x, self.codes, self.scale, self.bias)


class QuantizedBlock(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.up = QuantizedLinear(DIM, 2 * DIM)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "block",
    [WeightNormBlock, SpectralBlock, PrunedBlock, ContextBlock, QuantizedBlock],
    ids=lambda block: block.__name__,
)
@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}], ids=str)
def test_blocks(block: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    """Parametrizations, pruning, autograd functions of one's own, quantized layers."""

    def run(model: L.LightningModule, callbacks: list[Callback]) -> Any:
        trainer_of(*callbacks, **options).fit(model, loader())

    seen = []

    def factory() -> L.LightningModule:
        model = Lit(block)
        model.net.layers[0].register_forward_hook(lambda *args: seen.append(args[2].detach()))
        return model

    results = []
    for callbacks in ([PartialCheckpoint()], []):
        seed_all(0)
        seen.clear()
        model = factory()
        run(model, list(callbacks))
        results.append({"state": dict(model.state_dict()), "features": list(seen)})
    assert_same(*results)
    assert len(seen) == 6  # a hook for features fires once a step


# --- Fabric


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_fabric(precision: Any) -> None:
    """The plan is applied before `setup`, and the model that Fabric gives back follows it."""
    results = []
    for checkpointed in (True, False):
        fabric = Fabric(accelerator="cpu", devices=1, precision=precision)
        seed_all(0)
        model = Stack(NormBlock, 4)
        handle = apply_partial_checkpoint(model) if checkpointed else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        wrapped, made = fabric.setup(model, optimizer)
        names = [name.removeprefix("net.") for name in NAMES]
        with executions(model, names) as counts:
            for rows in fabric.setup_dataloaders(loader()):
                made.zero_grad()
                loss = wrapped(rows.to(model.head.weight.dtype)).pow(2).mean()
                fabric.backward(loss)
                fabric.clip_gradients(wrapped, made, max_norm=0.1)
                made.step()
        assert set(counts.values()) == {6 if checkpointed else 3}
        if handle is not None:
            handle.remove()
        results.append([dict(model.state_dict()), optimizer.state_dict()])
    assert_same(*results)


def test_scaled_float16() -> None:
    """What "16-mixed" does; Lightning itself refuses it on a CPU. Some gradients overflow."""

    def step(model: nn.Module, index: int) -> Any:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.autocast("cpu", torch.float16):
            loss = model(batch(index)).float().pow(2).mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.detach(), scaler.get_scale()

    compare(lambda: Stack(NormBlock, 4), step)


# --- after the training


@pytest.fixture(scope="module")
def trained() -> Stack:
    """A net out of a checkpointed fit, ready for use."""
    model = Lit(MlpBlock)
    trainer_of(PartialCheckpoint(), max_epochs=1).fit(model, loader())
    return model.net.eval()


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("way", [torch.jit.script, lambda net: torch.jit.trace(net, rows())])
def test_torchscript(trained: Stack, way: Callable[[Stack], Any], tmp_path: Path) -> None:
    made = way(trained)
    torch.jit.save(made, tmp_path / "net.pt")
    again = torch.jit.load(tmp_path / "net.pt")
    with torch.no_grad():
        assert torch.equal(again(rows()), trained(rows()))


def rows() -> Tensor:
    return next(iter(loader()))


def test_torch_export(trained: Stack) -> None:
    program = torch.export.export(trained, (rows(),))
    with torch.no_grad():
        assert torch.equal(program.module()(rows()), trained(rows()))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_onnx(trained: Stack, tmp_path: Path) -> None:
    """The graph has the operations of the plain net."""
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxscript")
    kinds = []
    for name, net in (("ours", trained), ("plain", Stack(MlpBlock, 4).eval())):
        torch.onnx.export(net, (rows(),), tmp_path / name, dynamo=True, verbose=False)
        kinds.append([node.op_type for node in onnx.load(tmp_path / name).graph.node])
    assert kinds[0] == kinds[1]
