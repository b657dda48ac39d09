"""`on_oom="tighten"` in a Trainer: the training is the one in which memory did not run out."""

from __future__ import annotations

import gc
import io
import pickle
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from helpers import DIM, MlpBlock, Stack, assert_same, generator_states, seed_all
from lightning.pytorch.callbacks import BatchSizeFinder, Callback, OnExceptionCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lit_helpers import Lit, assert_plain, leftovers, loader, trainer_of
from oom_helpers import MESSAGE, Bomb, Limit, bits
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_ckpt import (
    PartialCheckpoint,
    PartialCheckpointDDPStrategy,
    PartialCheckpointStrategy,
    PeakMemoryMonitor,
)
from lightning_ckpt._lightning import around_closures
from lightning_ckpt.core.memory import track_peak
from lightning_ckpt.surviving import is_out_of_memory, refuse_unrepeatable

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


@pytest.fixture(autouse=True)
def quick_collection() -> Iterator[None]:
    """At each failure garbage is collected: look only at what is new, not at all of torch. (In
    torch 2.8 a forward that failed leaves a checkpoint's hooks until its frames are collected.)"""
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


class LoggingLit(Lit):
    """Logs in all ways, counts, and arms a bomb in one batch."""

    def __init__(self, bomb: Any = None, where: tuple[int, int] = (-1, -1)) -> None:
        super().__init__()
        self.bomb, self.where = [bomb], where
        self.mean = MeanMetric()
        self.num_zeroed = self.num_steps = 0
        self.log_of_all: list[dict[str, Tensor]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        bomb = self.bomb[0]
        if bomb is not None:
            bomb.is_armed = (self.current_epoch, batch_idx) == self.where
        self.num_steps += 1
        self.log("first", batch.sum(), on_step=True, on_epoch=True)
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx="max")
        self.mean(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.num_zeroed += 1

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.bomb[0] is not None:
            self.bomb[0].is_armed = False

    def on_train_batch_end(self, *args: Any) -> None:
        self.on_before_optimizer_step(None)

    def on_train_epoch_end(self) -> None:
        self.log_of_all.append({k: v.clone() for k, v in self.trainer.callback_metrics.items()})


class Progress(Callback):
    """What a checkpoint would say of how far the loops are."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.state = trainer.fit_loop.state_dict()


def train(
    at: Any = (),
    where: tuple[int, int] = (-1, -1),
    plan: Any = None,
    error: Any = None,
    lit: Any = LoggingLit,
    callbacks: Any = (),
    **options: Any,
) -> tuple[Any, Any]:
    """A fit of two epochs of six batches, one of which runs out of memory at operations `at`."""
    seed_all(0)
    plan = plan or PartialCheckpoint(every_n=4, on_oom="tighten")
    progress = Progress()
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5, **options}
    owners = [plan] if isinstance(plan, Callback) else []
    with Bomb(at, error) as bomb:
        model = lit(bomb, where)
        trainer = trainer_of(*owners, progress, *callbacks, **options)
        trainer.fit(model, loader(6))
    assert "_make_closure" not in vars(trainer.fit_loop.epoch_loop.automatic_optimization)
    assert_plain(model)
    model.bomb[0] = None
    left = leftovers(model)
    grads = {name: p.grad for name, p in model.named_parameters()}
    counts = (model.num_zeroed, model.num_steps, model.log_of_all, progress.state)
    return (model, bomb, plan), bits([left, grads, counts, generator_states()])


@pytest.fixture(scope="module")
def plain() -> Any:
    return train()[1]


@pytest.mark.parametrize("batch_idx", [3, 4, 5])
@pytest.mark.parametrize("at", [[5], [60], [110], [150], [190], [230], [80, 320]])
def test_as_if_nothing_had_failed(at: list[int], batch_idx: int, plain: Any) -> None:
    """Weights, buffers, optimizer, gradients, epoch means, metrics, counters and progress."""
    (_, bomb, callback), ours = train(at, (1, batch_idx))
    assert bomb.hits == callback.num_oom == len(at)
    assert_same(ours, plain)


def test_that_these_operations_lie_all_over_a_batch() -> None:
    (_, bomb, _), _ = train([10**9], (1, 4))
    assert 230 < bomb.count < 320


def test_by_default_the_error_ends_the_run() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        train([60], (1, 4), PartialCheckpoint(every_n=4))


@pytest.mark.parametrize(
    "message", ["CUDA out of memory. Tried", "DefaultCPUAllocator: can't allocate memory: you"]
)
def test_runtime_errors_that_say_so(message: str, plain: Any) -> None:
    class Error(RuntimeError):
        def __init__(self, _: str) -> None:
            super().__init__(message)

    (_, _, callback), ours = train([100], (1, 4), error=Error)
    assert callback.num_oom == 1
    assert_same(ours, plain)


@pytest.mark.parametrize("error", [MemoryError, ValueError, KeyboardInterrupt])
def test_other_errors_pass(error: Any) -> None:
    callback = PartialCheckpoint(every_n=4, on_oom="tighten")
    raised = SystemExit if error is KeyboardInterrupt else error
    with pytest.raises(raised):
        train([60], (1, 4), callback, error)
    assert callback.num_oom == 0


def test_words_of_an_error() -> None:
    assert not is_out_of_memory(RuntimeError(3))
    assert not is_out_of_memory(RuntimeError("CUDA error: device-side assert"))
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("", 3))


# --- the plan


def test_the_plan_stays_and_is_told(plain: Any) -> None:
    told: list[dict[str, Any]] = []
    saved: list[Any] = []

    class Logger(DummyLogger):
        def log_hyperparams(self, params: Any = None, *args: Any, **kwargs: Any) -> None:
            if isinstance(params, dict):
                told.append(params)

    class Looks(Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            saved.append(trainer._checkpoint_connector.dump_checkpoint()["partial_checkpoint"])

    out = io.StringIO()
    with redirect_stdout(out):
        train([60, 250], (0, 4), callbacks=[Looks()], logger=Logger(), log_every_n_steps=1)
    recomputed = [sum(b["action"] == "recompute" for b in plan["blocks"]) for plan in saved]
    assert recomputed == [1] * 4 + [4] * 8
    lines = [line for line in out.getvalue().splitlines() if "Out of memory" in line]
    assert lines == [
        "Out of memory in epoch 0, batch 4, repeated 2 times: of 4 blocks 1 were recomputed as a "
        "whole, from now on 4"
    ]
    (final,) = [p["partial_checkpoint_final"] for p in told if "partial_checkpoint_final" in p]
    assert [block["action"] for block in final["blocks"]] == ["recompute"] * 4


def test_a_run_without_errors_tells_no_final_plan() -> None:
    out = io.StringIO()
    with redirect_stdout(out):
        (_, _, callback), _ = train()
    assert "Out of memory" not in out.getvalue()
    assert callback.num_oom == 0


class WideLit(L.LightningModule):
    """Activations outweigh parameters: what a plan keeps decides whether it fits."""

    def __init__(self, num_blocks: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MlpBlock(16) for _ in range(num_blocks))
        self.limit: list[Any] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for limit in self.limit:
            limit.is_armed = batch_idx > 0
        for layer in self.layers:
            batch = layer(batch)
        return batch.pow(2).mean()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for limit in self.limit:
            limit.is_armed = False

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit_within(limit: int | None, *callbacks: Any) -> tuple[Any, int, int]:
    """Fit with a device of so many bytes; gives what is left, the peak and how often it was full.
    The first batch is let through: a budget is measured there."""
    seed_all(0)
    data = torch.randn(512 * 4, 16, generator=torch.Generator().manual_seed(3))
    model = WideLit()
    batches: Any = DataLoader(data, batch_size=512)  # type: ignore[arg-type]
    with ExitStack() as stack:
        tracker = stack.enter_context(track_peak(model, data))
        hits = 0
        if limit is not None:
            model.limit = [stack.enter_context(Limit(tracker, limit))]
        trainer_of(*callbacks, max_epochs=1).fit(model, batches)
        hits = sum(each.hits for each in model.limit)
        peak = tracker.peak_bytes
    return bits(leftovers(model)["state"]), peak, hits


@pytest.fixture(scope="module")
def ends() -> tuple[Any, int, int]:
    """What plain training leaves behind, its peak, and that of every block recomputed."""
    plain, most, _ = fit_within(None)
    return plain, most, fit_within(None, PartialCheckpoint())[1]


@pytest.mark.parametrize("share", [0.15, 0.5, 0.8])
def test_tightening_helps(share: float, ends: tuple[Any, int, int]) -> None:
    plain, most, least = ends
    callback = PartialCheckpoint(every_n=100, on_oom="tighten")
    ours, _, hits = fit_within(int(least + share * (most - least)), callback)
    assert callback.num_oom == hits > 0
    assert_same(ours, plain)


def test_with_a_budget_later_plans_have_less(ends: tuple[Any, int, int]) -> None:
    """The user's figure was too high by a half of what plans can save."""
    plain, most, least = ends
    budget = int(least + 0.9 * (most - least))
    callback = PartialCheckpoint(budget=budget, on_oom="tighten")
    budgets: list[int] = []

    class Looks(Callback):
        def on_train_end(self, *args: Any) -> None:
            batches = callback.fit_plan._batches
            assert batches is not None
            budgets.append(batches._budget)

    seed_all(0)
    limit = int(least + 0.4 * (most - least))
    ours, _, hits = fit_within(limit, callback, Looks())
    assert callback.num_oom == hits > 0
    assert budgets[0] < 0.91 * budget
    assert_same(ours, plain)


def test_an_error_in_a_measured_step_says_so() -> None:
    """There every block is recomputed as a whole, and nothing is offloaded whatever the words."""
    callback = PartialCheckpoint(budget="1GiB", offload="disk", on_oom="tighten")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train([60], (0, 0), callback)
    (note,) = caught.value.__notes__
    assert "was being measured for budget=, with every block recomputed" in note
    assert "tightest" not in note
    assert callback.num_oom == 0


def test_a_step_after_the_measured_one_is_at_its_tightest() -> None:
    callback = PartialCheckpoint(budget="1GiB", on_oom="tighten")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train([60, 70, 80, 90, 100, 110], (1, 4), callback)
    (note,) = caught.value.__notes__
    assert "at its tightest" in note
    assert "measured" not in note


def test_a_plan_of_ones_own(plain: Any) -> None:
    blocks = [{"name": f"net.layers.{i}", "action": "keep"} for i in range(4)]
    callback = PartialCheckpoint(plan={"blocks": blocks}, on_oom="tighten")
    (_, _, _), ours = train([60, 250], (1, 4), callback)
    assert callback.num_oom == 2
    assert_same(ours, plain)


def test_offload_goes_on(plain: Any, tmp_path: Path) -> None:
    from lightning_ckpt import OffloadConfig

    config = OffloadConfig("disk", directory=str(tmp_path), min_bytes=0)
    callback = PartialCheckpoint(every_n=4, offload=config, on_oom="tighten")
    moved = []

    class Looks(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            handle = callback.handle
            assert handle is not None
            assert handle.offloader is not None
            moved.append((handle.offloader.config, handle.plan.blocks[1].offload))

    for at in ([60], [230]):
        moved.clear()
        ours = train(at, (1, 4), callback, callbacks=[Looks()])[1]
        assert_same(ours, plain)
        assert moved[0] == (config, None)
        assert moved[-1] == (config, "disk")


@pytest.mark.filterwarnings(r"ignore:.*.fit\(ckpt_path=")  # of a callback that may resume
def test_given_up_at_the_tightest(tmp_path: Path) -> None:
    saving = OnExceptionCheckpoint(str(tmp_path))
    callback = PartialCheckpoint(every_n=4, on_oom="tighten")
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
        train([5, 10, 15, 20], (1, 4), callback, callbacks=[saving], enable_checkpointing=True)
    assert "after 2 repeats" in caught.value.__notes__[0]
    assert callback.handle is None
    saved = torch.load(tmp_path / "on_exception.ckpt", weights_only=False)
    assert saved["global_step"] == 3


class MovingLit(LoggingLit):
    """Its target follows in the training step: most of a model, so nobody keeps a copy."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.target = nn.Linear(DIM, DIM).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.target.weight.lerp_(self.net.stem.weight.detach(), 0.1)
        return loss


def test_given_up_where_the_batch_cannot_be_repeated() -> None:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        train([230], (1, 4), lit=MovingLit)
    assert "'target.weight' was changed in place" in caught.value.__notes__[0]


def test_an_error_in_the_optimizers_step_passes() -> None:
    """It may have moved some parameters already."""

    class Lit(LoggingLit):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    callback = PartialCheckpoint(every_n=4, on_oom="tighten")
    with pytest.raises(torch.OutOfMemoryError):
        train(plan=callback, lit=Lit)
    assert callback.num_oom == 0


# --- what Lightning does around a batch


class LBFGSLit(LoggingLit):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


@pytest.mark.parametrize("at", [100, 400, 800])
def test_an_optimizer_that_asks_several_times(at: int) -> None:
    options: dict[str, Any] = {"lit": LBFGSLit, "accumulate_grad_batches": 1}
    expected = train(**options)[1]
    (_, bomb, _), ours = train([at], (1, 4), **options)
    assert bomb.hits == 1
    assert_same(ours, expected)


@pytest.mark.parametrize("at", [60, 200])
def test_half_precision_with_a_scaler(at: int) -> None:
    def options() -> dict[str, Any]:
        scaler = torch.amp.GradScaler("cpu")
        return {"plugins": [MixedPrecision("16-mixed", "cpu", scaler)]}

    expected = train(**options())[1]
    (_, bomb, _), ours = train([at], (1, 4), **options())
    assert bomb.hits == 1
    assert_same(ours, expected)


def test_bfloat16(plain: Any) -> None:
    expected = train(precision="bf16-mixed")[1]
    assert_same(train([200], (1, 4), precision="bf16-mixed")[1], expected)


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("at", [60, 200])
def test_anomaly_detection(at: int, plain: Any) -> None:
    assert_same(train([at], (1, 4), detect_anomaly=True)[1], plain)


def test_beside_verify(plain: Any) -> None:
    callback = PartialCheckpoint(every_n=4, on_oom="tighten", verify=True)
    assert_same(train([200], (1, 4), callback)[1], plain)


def test_beside_the_monitor(plain: Any) -> None:
    """One batch is one step, however often it is tried."""
    monitor = PeakMemoryMonitor(table=False, plot=False)
    train([200], (1, 4), callbacks=[monitor])
    clean = PeakMemoryMonitor(table=False, plot=False)
    train(callbacks=[clean])
    rows, expected = monitor.summary(), clean.summary()
    assert [row["epoch"] for row in rows] == [0, 1]
    assert rows[0]["peak_allocated_MiB"] == expected[0]["peak_allocated_MiB"]
    assert [row["plan"][:11] for row in rows] == ["1 of 4 bloc", "1 to 3 of 4"]


def test_as_a_strategy(plain: Any) -> None:
    strategy = PartialCheckpointStrategy(every_n=4, on_oom="tighten")
    (_, bomb, _), ours = train([200], (1, 4), strategy, strategy=strategy)
    assert bomb.hits == strategy.num_oom == 1
    assert_same(ours, plain)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # dynamo's own looking
@pytest.mark.parametrize("whole", [False, True])
def test_compiled(whole: bool) -> None:
    """Other classes: dynamo compiles anew."""

    class CompiledLit(LoggingLit):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.net = Stack(MlpBlock, 4)
            for part in [self.net] if whole else self.net.layers:
                part.compile(backend="aot_eager")

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            self.num_steps += 1
            loss = self(batch).pow(2).mean()
            if (self.current_epoch, batch_idx) == self.where and self.bomb[0].at:
                self.bomb[0].at.pop()
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return loss

    def run(*args: Any) -> Any:
        torch._dynamo.reset()
        seed_all(0)
        model = CompiledLit(SimpleNamespace(at=list(args[:1]), is_armed=False), (1, 4))
        callback = PartialCheckpoint(every_n=4, on_oom="tighten")
        plans = []

        class Looks(Callback):
            def on_train_end(self, *args: Any) -> None:
                plans.append(callback.handle.plan.num_recomputed)  # type: ignore[union-attr]

        trainer_of(callback, Looks(), accumulate_grad_batches=3).fit(model, loader(6))
        assert callback.num_oom == len(args)
        assert plans == [3 if args else 1]
        return bits(leftovers(model)["state"])

    assert_same(run(1), run())


class SizedLit(LoggingLit):
    """Runs out of memory with more than 8 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2
        self.tried: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.tried.append(len(batch))
        if len(batch) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.randn(64, DIM), batch_size=self.batch_size)  # type: ignore[arg-type]

    def val_dataloader(self) -> Any:
        return DataLoader(torch.randn(2, DIM))  # type: ignore[arg-type]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("as_strategy", [True, False])
def test_the_batch_size_finder_gets_the_error_itself(
    first: bool, as_strategy: bool, tmp_path: Path
) -> None:
    words = {"every_n": 4, "on_oom": "tighten"}
    finder = BatchSizeFinder(steps_per_trial=1)
    options: dict[str, Any] = {"max_epochs": 1, "default_root_dir": tmp_path}
    if as_strategy:
        owner: Any = PartialCheckpointStrategy(**words)
        options["strategy"] = owner
        callbacks: list[Any] = [finder]
    else:
        owner = PartialCheckpoint(**words)
        callbacks = [owner, finder] if first else [finder, owner]
    model = SizedLit()
    trainer_of(*callbacks, **options).fit(model)
    assert finder.optimal_batch_size == 8
    assert model.tried.count(16) == 1, "no repeat"
    assert owner.num_oom == 0


class Averaging(Callback):
    """Keeps something outside of the module, in the hooks that Lightning calls within a closure."""

    def __init__(self) -> None:
        self.counts = dict.fromkeys(("zero_grad", "before", "after"), 0)
        self.norms: list[Tensor] = []
        self.average = torch.zeros(())

    def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.counts["zero_grad"] += 1
        self.average.lerp_(next(pl_module.parameters()).detach().sum(), 0.1)

    def on_before_backward(self, trainer: Any, pl_module: Any, loss: Tensor) -> None:
        self.counts["before"] += 1

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.counts["after"] += 1
        self.norms.append(next(pl_module.parameters()).grad.norm())


class LateError(Averaging):
    """Memory runs out after the hooks of the others, once."""

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        if trainer.global_step == 1 and not getattr(trainer, "has_failed", False):
            trainer.has_failed = True
            raise torch.OutOfMemoryError(MESSAGE)


def test_callbacks_that_take_part_are_put_back(plain: Any) -> None:
    without, met = Averaging(), Averaging()
    train(callbacks=[without])
    (_, _, plan), left = train(callbacks=[met, LateError()])
    assert plan.num_oom == 1
    assert_same(left, plain)
    for name in ("counts", "norms", "average"):
        assert_same(getattr(met, name), getattr(without, name))


def test_a_callback_that_moves_parameters_cannot_be_repeated() -> None:
    class MovingLate(Averaging):
        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.model = nn.Linear(2, 2)

        def on_before_zero_grad(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
            with torch.no_grad():
                self.model.weight.add_(1)

    with pytest.raises(torch.OutOfMemoryError) as caught:
        train(callbacks=[MovingLate(), LateError()], accumulate_grad_batches=1)
    assert "cannot be repeated" in str(getattr(caught.value, "__notes__", caught.value))


# --- refusals


class ManualLit(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class IteratorLit(Lit):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return super().training_step(next(dataloader_iter)[0], 0)


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter` step flavor")
@pytest.mark.parametrize(
    ("lit", "words"), [(ManualLit, "optimizes by hand"), (IteratorLit, "dataloader_iter")]
)
def test_modules_that_cannot_be_repeated(lit: Any, words: str) -> None:
    callback = PartialCheckpoint(on_oom="tighten")
    with pytest.raises(MisconfigurationException, match=f"on_oom='tighten'.*{words}"):
        trainer_of(callback).fit(lit(), loader())
    assert callback.handle is None


def test_several_ranks_are_refused() -> None:
    trainer: Any = SimpleNamespace(world_size=2, strategy=None, lightning_module=Lit())
    with pytest.raises(MisconfigurationException, match=r"2 ranks.*others would wait"):
        refuse_unrepeatable(trainer)


def test_ddp_is_refused() -> None:
    strategy = PartialCheckpointDDPStrategy(on_oom="tighten")
    with pytest.raises(MisconfigurationException, match=r"keeps account.*strategy='auto'"):
        trainer_of(strategy=strategy).fit(Lit(), loader())
    dist.destroy_process_group()


@pytest.mark.parametrize("make", [PartialCheckpoint, PartialCheckpointStrategy])
def test_other_words(make: Any) -> None:
    with pytest.raises(ValueError, match="on_oom='retry' is not known"):
        make(on_oom="retry")


def test_with_raise_nothing_is_refused_or_attached() -> None:
    class Looks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            loop = trainer.fit_loop.epoch_loop.automatic_optimization
            assert "_make_closure" not in vars(loop)

    trainer_of(PartialCheckpoint(), Looks()).fit(Lit(), loader())


# --- what is left behind, and private names


def test_a_batch_is_gone_after_its_step() -> None:
    alive: list[Any] = []

    class Looks(Callback):
        def on_train_batch_start(
            self, trainer: Any, module: Any, batch: Any, batch_idx: int
        ) -> None:
            assert sum(ref() is not None for ref in alive) <= 1
            alive.append(weakref.ref(batch))

    train(callbacks=[Looks()])
    assert len(alive) == 12


def test_a_second_fit_begins_with_the_words_again(plain: Any) -> None:
    callback = PartialCheckpoint(every_n=4, on_oom="tighten")
    for _ in range(2):
        ours = train([200], (1, 4), callback)[1]
        assert callback.num_oom == 1
        assert_same(ours, plain)


def test_the_callback_can_be_pickled_in_fit() -> None:
    callback = PartialCheckpoint(every_n=4, on_oom="tighten")

    class Pickles(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            assert pickle.loads(pickle.dumps(callback)).fit_plan.on_oom == "tighten"

    train(plan=callback, callbacks=[Pickles()])


def test_private_names_of_lightning() -> None:
    """`around_closures` sees each batch, what `self.log` has of it, and where backward begins."""
    seen: list[Any] = []

    class Looks(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            def around(closure: Any, *args: Any, **kwargs: Any) -> Any:
                kwargs_of_step, results, progress = closure.given
                seen.append((closure.batch_idx, list(kwargs_of_step), len(results)))
                result = closure.run(*args, **kwargs)
                seen.append((len(results), progress.optimizer.zero_grad.total.completed))
                return result

            self.undo = around_closures(trainer, around, lambda: seen.append("backward"))

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            self.undo()

    trainer_of(Looks(), max_epochs=1).fit(LoggingLit(), loader())
    assert seen == [(0, ["batch", "batch_idx"], 0), "backward", (4, 1)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_device_that_is_full() -> None:
    """A fraction of the device's memory between what all recomputed and what plain training needs;
    weights equal to plain training's."""

    def fit(callback: Any, fraction: float) -> tuple[Any, int]:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(fraction)
        torch.cuda.reset_peak_memory_stats()
        seed_all(0)
        model = WideLit()
        data = torch.randn(4 * 2**19, 16, generator=torch.Generator().manual_seed(3))
        batches: Any = DataLoader(data, batch_size=2**19)  # type: ignore[arg-type]
        owners = [callback] if callback else []
        trainer_of(*owners, accelerator="gpu", max_epochs=1).fit(model, batches)
        return leftovers(model)["state"], torch.cuda.max_memory_reserved()

    total = torch.cuda.get_device_properties(0).total_memory
    try:
        plain, most = fit(None, 1.0)
        _, least = fit(PartialCheckpoint(), 1.0)
        callback = PartialCheckpoint(every_n=100, on_oom="tighten")
        ours, peak = fit(callback, (least + most) / 2 / total)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert callback.num_oom > 0
    assert peak < most
    assert_same(ours, plain)
