"""A budget in a Trainer: one measured step, then the plan; the same training throughout."""

from __future__ import annotations

import io
import pickle
import re
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import yaml
from helpers import MlpBlock, assert_same, executions, seed_all
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import (
    PartialCheckpoint,
    PartialCheckpointDDPStrategy,
    PartialCheckpointStrategy,
    PeakMemoryMonitor,
)
from lightning_ckpt.core import watchers
from lightning_ckpt.core.budget.measure import UNNAMED as BUCKETS
from lightning_ckpt.core.budget.words import BudgetTooSmall
from lightning_ckpt.core.memory import mode_stack, track_peak
from lightning_ckpt.core.memory.live_bytes import LiveBytes

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
]

DIM, ROWS, STEPS, MIB = 16, 256, 3, 2**20
NAMES = [f"layers.{index}" for index in range(4)]


class Lit(L.LightningModule):
    """Four blocks with dropout, and a head."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MlpBlock(DIM) for _ in range(num_blocks))
        self.head = nn.Linear(DIM, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return self.head(batch).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class ManualLit(Lit):
    """Two backward passes in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        for part in batch.chunk(2):
            self.manual_backward(super().training_step(part, batch_idx))
        optimizer.step()


class Peaks(Callback):
    """The peak of each batch, and how often each block ran in it."""

    def __init__(self) -> None:
        self.peaks: list[int] = []
        self.counts: list[list[int]] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._executions = executions(module, [n for n in NAMES if hasattr(module, "layers")])
        self._seen = self._executions.__enter__()
        self._tracking = track_peak(module, trainer.optimizers, batch)
        self._tracker = self._tracking.__enter__()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tracking.__exit__(None, None, None)
        self._executions.__exit__(None, None, None)
        self.peaks.append(self._tracker.peak_bytes)
        self.counts.append([self._seen[name] for name in NAMES])


def loader(num: int = STEPS, rows: int = ROWS) -> DataLoader:
    data = torch.randn(num * rows, DIM, generator=torch.Generator().manual_seed(3))
    return DataLoader(data, batch_size=rows)


def trainer_of(*callbacks: Callback, **kwargs: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "max_epochs": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return L.Trainer(callbacks=list(callbacks), **(defaults | kwargs))


def train(*callbacks: Callback, lit: Any = Lit, **kwargs: Any) -> tuple[Lit, Peaks]:
    seed_all(0)
    model, peaks = lit(), Peaks()
    trainer_of(*callbacks, peaks, **kwargs).fit(model, loader())
    return model, peaks


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.fixture(scope="module")
def ends() -> tuple[int, int]:
    """The peaks of every block recomputed, and of plain training."""
    return tuple(  # type: ignore[return-value]
        max(train(*callbacks)[1].peaks) for callbacks in ([PartialCheckpoint()], [])
    )


SHARES = [0.02, 0.3, 0.6, 0.95]


@pytest.mark.parametrize("share", SHARES)
def test_the_budget_is_held_and_used(share: float, ends: tuple[int, int]) -> None:
    """Same weights bit for bit; the first step recomputes all, the others only what they must."""
    budget = int(ends[0] + share * (ends[1] - ends[0]))
    callback = PartialCheckpoint(budget=budget)
    plain, plain_peaks = train()
    plans = []

    class Keeper(Callback):
        def on_train_end(self, trainer: Any, module: Any) -> None:
            plans.append(callback.handle.plan)  # type: ignore[union-attr]

    model, peaks = train(callback, Keeper())
    assert_same(state_of(model), state_of(plain))
    assert peaks.counts[0] == [2, 2, 2, 2]
    assert set(map(tuple, plain_peaks.counts)) == {(1, 1, 1, 1)}
    later = [2 if block.action != "keep" else 1 for block in plans[0]]
    assert peaks.counts[1:] == [later] * (2 * STEPS - 1)
    assert max(peaks.peaks) <= budget
    predicted = float(re.findall(r"peak at ([0-9.]+) KiB", plans[0].notes[0])[0]) * 1024
    assert max(peaks.peaks) <= predicted + 52  # what is shown is rounded to a tenth of a KiB
    assert predicted <= 1.03 * max(peaks.peaks)


def test_more_budget_recomputes_less(ends: tuple[int, int]) -> None:
    totals = []
    for share in SHARES:
        budget = int(ends[0] + share * (ends[1] - ends[0]))
        _, peaks = train(PartialCheckpoint(budget=budget))
        totals.append(sum(peaks.counts[-1]))
    assert totals == sorted(totals, reverse=True)
    assert totals[0] == 7  # the last block is kept for nothing
    assert totals[-1] < 7


def test_a_large_budget_checkpoints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    _, peaks = train(PartialCheckpoint(budget="1GiB"))
    assert peaks.counts == [[2] * 4] + [[1] * 4] * (2 * STEPS - 1)
    assert "nothing is checkpointed" in " ".join(capsys.readouterr().out.split())


def test_a_small_budget_names_the_least_that_would_do(ends: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="largest terms") as caught:
        train(PartialCheckpoint(budget="9KiB"))
    least = int(re.findall(r"\((\d+) bytes\)", str(caught.value))[0])
    assert ends[0] <= least <= 1.03 * ends[0]
    assert mode_stack._entered == []
    assert watchers._watchers == []
    _, peaks = train(PartialCheckpoint(budget=least))
    assert max(peaks.peaks) <= least


@pytest.mark.parametrize("accumulate", [2, 3])
def test_gradients_that_accumulate(accumulate: int, ends: tuple[int, int]) -> None:
    """The measurement takes in all micro-batches up to the optimizer's step."""
    budget = (ends[0] + ends[1]) // 2
    kwargs: dict[str, Any] = {"accumulate_grad_batches": accumulate}
    plain, _ = train(**kwargs)
    model, peaks = train(PartialCheckpoint(budget=budget), **kwargs)
    assert_same(state_of(model), state_of(plain))
    assert peaks.counts[:accumulate] == [[2] * 4] * accumulate
    assert sum(peaks.counts[accumulate]) < 8
    assert max(peaks.peaks) <= budget


def test_manual_optimization(ends: tuple[int, int]) -> None:
    plain, _ = train(lit=ManualLit)
    recomputed = max(train(PartialCheckpoint(), lit=ManualLit)[1].peaks)
    budget = recomputed + (ends[1] - ends[0]) // 3
    model, peaks = train(PartialCheckpoint(budget=budget), lit=ManualLit)
    assert_same(state_of(model), state_of(plain))
    assert sum(peaks.counts[1]) < sum(peaks.counts[0])
    assert max(peaks.peaks) <= budget


@pytest.mark.parametrize("first", [True, False])
def test_with_the_monitor(first: bool, ends: tuple[int, int]) -> None:
    """Two that follow live bytes, in either order, disturb neither each other nor the training."""
    budget = (ends[0] + ends[1]) // 2
    ours, monitor = PartialCheckpoint(budget=budget), PeakMemoryMonitor()
    logged = []

    class Reader(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            logged.append(float(trainer.callback_metrics["memory/peak_allocated_MiB"]) * MIB)

    callbacks = [ours, monitor] if first else [monitor, ours]
    _, peaks = train(*callbacks, Reader())
    assert logged[1] == max(peaks.peaks[STEPS:])
    assert max(logged) <= budget
    assert mode_stack._entered == []


def test_the_trainer_and_the_model_are_as_before(ends: tuple[int, int]) -> None:
    model, callback = Lit(), PartialCheckpoint(budget=ends[1])
    trainer = trainer_of(callback)
    before, classes = list(trainer.callbacks), [type(m) for m in model.modules()]  # type: ignore[attr-defined]
    for _ in range(2):
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(model, loader())
        assert trainer.callbacks == before  # type: ignore[attr-defined]
        assert [type(m) for m in model.modules()] == classes
        assert callback.handle is None
    assert pickle.loads(pickle.dumps(callback)).fit_plan.budget == ends[1]


def test_after_an_exception_nothing_is_left() -> None:
    class Failing(Lit):
        def on_after_backward(self) -> None:
            raise RuntimeError("in the measured step")

    model = Failing()
    trainer = trainer_of(PartialCheckpoint(budget="1GiB"))
    with pytest.raises(RuntimeError, match="in the measured step"):
        trainer.fit(model, loader())
    assert mode_stack._entered == []
    assert watchers._watchers == []
    assert len(trainer.callbacks) == 1  # type: ignore[attr-defined]
    assert all(type(layer) is MlpBlock for layer in model.layers)


def test_the_plan_is_logged_and_can_be_given_back(tmp_path: Path, ends: tuple[int, int]) -> None:
    """`plan=` with what the logger has: the same plan from the first step on, nothing measured."""
    budget = (ends[0] + ends[1]) // 2
    _, planned = train(
        PartialCheckpoint(budget=budget), logger=CSVLogger(tmp_path), log_every_n_steps=1
    )
    logged = yaml.safe_load(next(tmp_path.rglob("hparams.yaml")).read_text())
    path = tmp_path / "plan.yaml"
    path.write_text(yaml.safe_dump(logged["partial_checkpoint"]["plan"]))
    plain, _ = train()
    model, peaks = train(PartialCheckpoint(plan=str(path)))
    assert_same(state_of(model), state_of(plain))
    assert peaks.counts == [planned.counts[-1]] * 2 * STEPS


class Refusing(DummyLogger):
    """Takes a parameter once, as MLflow does."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Any] = []

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        if self.taken and self.taken[-1] != params:
            raise ValueError("changing values is not allowed")
        self.taken.append(params)


@pytest.mark.parametrize("owner", [PartialCheckpoint, PartialCheckpointStrategy])
def test_loggers_get_the_chosen_plan_alone(
    owner: Any, ends: tuple[int, int], capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = owner(budget=(ends[0] + ends[1]) // 2)
    logger = Refusing()
    options: dict[str, Any] = {"logger": logger, "log_every_n_steps": 1}
    if isinstance(adapter, Callback):
        trainer = trainer_of(adapter, **options)
    else:
        trainer = trainer_of(strategy=adapter, **options)
    trainer.fit(Lit(), loader())
    assert [list(params) for params in logger.taken] == [["partial_checkpoint"]]
    assert "plan" in logger.taken[0]["partial_checkpoint"]
    assert capsys.readouterr().out.count("the first step recomputes all") == 1


def test_a_checkpoint_carries_the_plan_and_a_resumed_run_measures_anew(
    tmp_path: Path, ends: tuple[int, int]
) -> None:
    budget = (ends[0] + ends[1]) // 2
    path = tmp_path / "last.ckpt"

    class Saver(Callback):
        def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
            trainer.save_checkpoint(path)

    train(PartialCheckpoint(budget=budget), Saver(), max_epochs=1)
    saved = torch.load(path, weights_only=False)["partial_checkpoint"]
    assert any(block["action"] == "keep" for block in saved["blocks"])
    seed_all(0)
    model, peaks = Lit(), Peaks()
    trainer = trainer_of(PartialCheckpoint(budget=budget), peaks)
    trainer.fit(model, loader(), ckpt_path=path, weights_only=False) if _takes_flag(
        trainer
    ) else trainer.fit(model, loader(), ckpt_path=path)
    assert peaks.counts[0] == [2] * 4
    assert sum(peaks.counts[1]) < 8
    assert max(peaks.peaks) <= budget


def _takes_flag(trainer: L.Trainer) -> bool:
    return "weights_only" in trainer.fit.__code__.co_varnames


class Growing(Lit):
    """Gets another block in its second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers.append(MlpBlock(DIM))


def test_other_blocks_are_measured_anew(ends: tuple[int, int]) -> None:
    _, peaks = train(PartialCheckpoint(budget="1GiB"), lit=Growing, max_epochs=3)
    each = [sum(counts) for counts in peaks.counts]
    assert each == [8, 4, 4, 8, 4, 4, 4, 4, 4]


# --- strategies


def test_a_strategy_takes_a_budget(ends: tuple[int, int]) -> None:
    budget = (ends[0] + ends[1]) // 2
    plain, _ = train()
    model, peaks = train(strategy=PartialCheckpointStrategy(budget=budget))
    _, by_callback = train(PartialCheckpoint(budget=budget))
    assert_same(state_of(model), state_of(plain))
    assert sum(peaks.counts[-1]) == sum(by_callback.counts[-1]) < 8
    assert max(peaks.peaks) <= budget
    plan = {"blocks": [{"name": "layers.1", "action": "recompute"}]}
    _, peaks = train(strategy=PartialCheckpointStrategy(plan=plan))
    assert peaks.counts == [[1, 2, 1, 1]] * 2 * STEPS


class UnevenLit(Lit):
    """Rank 1 has twice as many rows as rank 0."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch if dist.get_rank() else batch[: len(batch) // 2], 0)


def two_ranks() -> None:
    """Run by each rank of a pair: all get the plan that the rank with the most rows needs. (Alone,
    the other would recompute less.)"""
    seed_all(0)
    peaks = Peaks()
    budget = 940_000
    strategy = PartialCheckpointDDPStrategy(budget=budget)
    kwargs: dict[str, Any] = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
    trainer_of(peaks, **kwargs).fit(UnevenLit(), loader(rows=2 * ROWS))
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (peaks.counts, max(peaks.peaks)))
    (counts, peak), (other_counts, other_peak) = found
    assert counts == other_counts
    assert counts[0] == [2] * 4
    assert 4 < sum(counts[-1]) < 8
    assert peak < other_peak <= budget


class WideLit(L.LightningModule):
    """The gradients take as much as the activations."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh())
            for _ in range(4)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for layer in self.layers:
            batch = layer(batch)
        return batch.pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class LongPeaks(Callback):
    """The peak of each batch, by one who follows the whole fit, and so knows of all that is there
    at the start of a batch. The buckets he meets in the first backward."""

    def __init__(self) -> None:
        self.peaks: list[int] = []

        self._tracker = LiveBytes()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._tracker.resume(module, trainer.optimizers, batch)
        self._tracker.reset_peak()

    def on_train_batch_end(self, *args: Any) -> None:
        self._tracker.pause()  # the next batch is made of views of all data
        self.peaks.append(self._tracker.peak_bytes)

    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        self._tracker.stop()


def two_ranks_with_buckets() -> None:
    """Run by each rank of a pair: the buckets that DDP made before the measured step are within the
    budget too, and are named where it is too small."""
    num_bytes = 4 * sum(p.numel() for p in WideLit().parameters())
    data = torch.randn(8 * 128, 128, generator=torch.Generator().manual_seed(3))

    def fit(budget: int, **kwargs: Any) -> list[int]:
        seed_all(0)
        peaks = LongPeaks()
        strategy = PartialCheckpointDDPStrategy(budget=budget, **kwargs)
        trainer = trainer_of(peaks, strategy=strategy, devices=2, max_epochs=1)
        trainer.fit(WideLit(), DataLoader(data, batch_size=128))  # type: ignore[arg-type]
        return peaks.peaks

    with pytest.raises(BudgetTooSmall) as caught:
        fit(1000)
    assert caught.value.terms[BUCKETS] == pytest.approx(num_bytes, rel=0.01)
    assert BUCKETS in str(caught.value)
    for extra in (20_000, 90_000, 180_000):
        budget = caught.value.least + extra
        peak = max(fit(budget))
        assert budget - 200_000 < peak <= budget, (extra, peak - budget)
        assert max(fit(budget, gradient_as_bucket_view=True)) <= budget


# --- refusals


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"budget": "much"}, "budget='much'"),
        ({"budget": True}, "budget"),
        ({"budget": "1GiB", "every_n": 2}, "budget= and every_n="),
        ({"budget": "1GiB", "plan": {"blocks": [{"name": "a", "action": "keep"}]}}, "plan="),
        ({"plan": {"blocks": [{"name": "a", "action": "keep"}]}, "every_n": 2}, "plan="),
        ({"plan": "no such file"}, "no such file"),
    ],
)
@pytest.mark.parametrize("owner", [PartialCheckpoint, PartialCheckpointStrategy])
def test_bad_words(owner: Any, words: dict[str, Any], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        owner(**words)


@pytest.mark.parametrize("budget", ["auto", 0.5])
@pytest.mark.parametrize("owner", [PartialCheckpoint, PartialCheckpointStrategy])
def test_a_cpu_needs_a_figure(owner: Any, budget: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Said before the first step, and before a word on what that will do."""
    peaks, adapter = Peaks(), owner(budget=budget)
    as_callback = isinstance(adapter, PartialCheckpoint)
    trainer = trainer_of(adapter, peaks) if as_callback else trainer_of(peaks, strategy=adapter)
    with pytest.raises(ValueError, match="give bytes"):
        trainer.fit(Lit(), loader())
    assert peaks.counts == []
    assert "the first step" not in capsys.readouterr().out


def test_compiled_blocks_on_a_cpu_are_refused() -> None:
    """Their tensors cannot be followed there, so nothing could be foretold."""
    model = Lit()
    for layer in model.layers:
        layer.compile(backend="aot_eager")
    words = r"measure without `torch.compile`. Without a measured step, every_n= and plan= work"
    with pytest.raises(ValueError, match=words):
        trainer_of(PartialCheckpoint(budget="1GiB")).fit(model, loader())


def test_a_plan_of_another_model(tmp_path: Path) -> None:
    plan = {"blocks": [{"name": "layers.9", "action": "keep"}]}
    with pytest.raises(ValueError, match=r"layers\.9"):
        trainer_of(PartialCheckpoint(plan=plan)).fit(Lit(), loader())


def test_what_is_printed() -> None:
    """A line on the step that is measured, and the table of the plan."""
    with redirect_stdout(io.StringIO()) as out:
        train(PartialCheckpoint(budget="1GiB"))
    text = out.getvalue()
    assert re.findall(r"PartialCheckpoint: (.*) blocks", text) == [
        "the first step recomputes all 4",
        "0 of 4",
    ]
    assert text.count("Block class") == 1
