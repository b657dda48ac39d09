"""Batches of different lengths under a budget: a plan for each, within the budget, in a Trainer."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from helpers import assert_same, executions, seed_all
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler
from lightning.pytorch.loggers import CSVLogger
from lit_helpers import trainer_of
from test_budget_in_fit import Refusing, state_of
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_ckpt import (
    PartialCheckpoint,
    PartialCheckpointDDPStrategy,
    PartialCheckpointStrategy,
    PeakMemoryMonitor,
    budgeting,
)
from lightning_ckpt.core import watchers
from lightning_ckpt.core.memory import mode_stack, track_peak
from lightning_ckpt.core.swap import is_swapped

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
    pytest.mark.filterwarnings("ignore:Trying to infer the `batch_size`"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
    pytest.mark.filterwarnings("ignore:.*`dataloader_iter`"),
]

DIM, HEADS, VOCABULARY, ROWS = 16, 2, 32, 4
NAMES = [f"layers.{index}" for index in range(4)]


class Block(nn.Module):
    """Attention whose scores are there, so that bytes grow with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 4 * DIM), nn.Linear(4 * DIM, DIM)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        scores = self.dropout((q @ k.transpose(-1, -2)).softmax(-1))  # (B, H, T, T)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


class Lit(L.LightningModule):
    """A small language model."""

    def __init__(self, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(num_blocks))
        self.head = nn.Linear(DIM, VOCABULARY)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.embed(batch)
        for layer in self.layers:
            x = layer(x)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), batch.flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Batches(Callback):
    """Peak, recomputes and length of each batch."""

    def __init__(self, names: Sequence[str] = NAMES) -> None:
        self.names = names
        self.peaks: list[int] = []
        self.recomputes: list[int] = []

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self._counting = executions(module, self.names)
        self._counts = self._counting.__enter__()
        self._tracking = track_peak(module, trainer.optimizers, batch)
        self._tracker = self._tracking.__enter__()

    def on_train_batch_end(
        self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._tracking.__exit__(None, None, None)
        self._counting.__exit__(None, None, None)
        self.peaks.append(self._tracker.peak_bytes)
        self.recomputes.append(sum(self._counts.values()))


def lengths_of(num: int, longest: int = 64, seed: int = 0) -> list[int]:
    """Lognormal: median an eighth of the longest."""
    generator = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(num, generator=generator) / 2).exp() * longest / 8
    return drawn.clamp(2, longest).int().tolist()


def texts(lengths: Sequence[int], rows: int = ROWS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(VOCABULARY, (rows, n), generator=generator) for n in lengths]


LENGTHS = lengths_of(24)
TEXTS = texts(LENGTHS)


def loader_of(data: Sequence[Any]) -> Any:
    """The batches, each made anew, as they would be from files."""
    return DataLoader(data, batch_size=None, collate_fn=copy.deepcopy)  # type: ignore[arg-type]


def train(
    *callbacks: Callback,
    make: Callable[[], Any] = Lit,
    data: Sequence[Any] = TEXTS,
    names: Sequence[str] = NAMES,
    **options: Any,
) -> tuple[Any, Batches]:
    seed_all(0)
    model, batches = make(), Batches(names)
    trainer = trainer_of(*callbacks, batches, **({"max_epochs": 1} | options))
    trainer.fit(model, loader_of(data))
    return model, batches


class Ends:
    """Plain training, and training with every block recomputed."""

    def __init__(self, **options: Any) -> None:
        model, self.plain = train(**options)
        self.state = state_of(model)
        _, every = train(PartialCheckpoint(), **options)
        self.low, self.high = max(every.peaks), max(self.plain.peaks)
        self.num_plain = self.plain.recomputes[0]

    def budget(self, share: float) -> int:
        return int(self.low + share * (self.high - self.low))

    def recomputed(self, batches: Batches) -> list[int]:
        """How many blocks ran a second time in each batch."""
        return [count - self.num_plain for count in batches.recomputes]


@pytest.fixture(scope="module")
def ends() -> Ends:
    return Ends()


@pytest.mark.parametrize("share", [0.02, 0.4, 0.95])
def test_the_budget_is_held_in_each_batch(share: float, ends: Ends) -> None:
    budget = ends.budget(share)
    model, batches = train(PartialCheckpoint(budget=budget))
    assert_same(state_of(model), ends.state)
    assert max(batches.peaks) <= budget
    again = ends.recomputed(batches)
    assert again[0] == 4
    assert sum(again[12:]) < 12 * 4 / 2, "the short ones recompute nothing"
    assert 0 in again


def test_short_batches_keep_all_and_the_longest_do_not(ends: Ends) -> None:
    lengths = [24, 8, 12, 20, 16, 40, 30, 10, 36, 40, 38, 8, 40, 24, 4, 8, 40]
    options: dict[str, Any] = {"data": texts(lengths)}
    own = Ends(**options)
    _, batches = train(PartialCheckpoint(budget=own.budget(0.01)), **options)
    again = own.recomputed(batches)
    assert max(batches.peaks) <= own.budget(0.01)
    assert again[:6] == [4] * 6, "these were measured: four sizes for a parabola, and records"
    assert [n for n, length in zip(again[9:], lengths[9:], strict=True) if length < 20] == [0] * 3
    long = [n for n, length in zip(again[9:], lengths[9:], strict=True) if length == 40]
    assert min(long) >= 3, "all but the last, which may cost nothing"


def test_more_budget_recomputes_less(ends: Ends) -> None:
    totals = [
        sum(train(PartialCheckpoint(budget=ends.budget(share)))[1].recomputes)
        for share in (0.02, 0.4, 0.95)
    ]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > totals[-1]


class WithLoss(L.LightningModule):
    """Any model that gives a loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(**batch).loss

    configure_optimizers = Lit.configure_optimizers


class ConvBlock(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())


class Images(Lit):
    """Images of any width and height."""

    def __init__(self) -> None:
        L.LightningModule.__init__(self)
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.layers = nn.ModuleList(ConvBlock() for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        x = self.stem(batch)
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()


class LengthFirst(Lit):
    """Batches of (length, rows), as `nn.Transformer` takes them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM) for _ in range(4)
        )


def llama() -> tuple[Callable[[], Any], list[Any], list[str]]:
    import transformers as hf

    config = hf.LlamaConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, intermediate_size=32,
        vocab_size=VOCABULARY, use_cache=False,
    )  # fmt: skip
    data = [
        {"input_ids": t, "labels": t, "attention_mask": torch.ones_like(t)}
        for t in texts(LENGTHS[:20])
    ]
    names = [f"net.model.layers.{index}" for index in range(3)]
    return lambda: WithLoss(hf.LlamaForCausalLM(config)), data, names


def t5() -> tuple[Callable[[], Any], list[Any], list[str]]:
    import transformers as hf

    config = hf.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, vocab_size=VOCABULARY,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    pairs = zip(texts(lengths_of(30)), texts(lengths_of(30, seed=1)), strict=True)
    data = [{"input_ids": source, "labels": target} for source, target in pairs]
    names = [f"net.{part}.block.{index}" for part in ("encoder", "decoder") for index in range(2)]
    return lambda: WithLoss(hf.T5ForConditionalGeneration(config)), data, names


def mixture() -> tuple[Callable[[], Any], list[Any], list[str]]:
    """Experts that get more tokens or fewer, by what the tokens are."""
    import transformers as hf

    config = hf.MixtralConfig(
        hidden_size=16, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, vocab_size=VOCABULARY, num_local_experts=4, num_experts_per_tok=2,
        experts_implementation="eager", use_cache=False,
    )  # fmt: skip
    data = [{"input_ids": t, "labels": t} for t in TEXTS]
    names = [f"net.model.layers.{index}" for index in range(3)]
    return lambda: WithLoss(hf.MixtralForCausalLM(config)), data, names


def images() -> tuple[Callable[[], Any], list[Any], list[str]]:
    sides = zip(lengths_of(24, 160), lengths_of(24, 160, seed=1), strict=True)
    generator = torch.Generator().manual_seed(0)
    data = [torch.randn(2, 3, h + 4, w + 4, generator=generator) for h, w in sides]
    return Images, data, NAMES


def length_first() -> tuple[Callable[[], Any], list[Any], list[str]]:
    rows = [2 + index % 4 for index in range(30)]
    pairs = zip(lengths_of(30), rows, strict=True)
    return LengthFirst, [texts([n], each)[0].T.contiguous() for n, each in pairs], NAMES


@pytest.mark.parametrize("kind", [llama, t5, mixture, images, length_first])
def test_models_of_many_kinds(kind: Callable[[], Any]) -> None:
    make, data, names = kind()
    options: dict[str, Any] = {"make": make, "data": data, "names": names}
    own = Ends(**options)
    for share in (0.05, 0.5):
        model, batches = train(PartialCheckpoint(budget=own.budget(share)), **options)
        assert_same(state_of(model), own.state)
        assert max(batches.peaks) <= own.budget(share)
        again = own.recomputed(batches)
        assert sum(again) < 0.75 * own.num_plain * len(data)


@pytest.mark.parametrize("accumulate", [2, 3])
def test_gradients_that_accumulate(accumulate: int) -> None:
    """Each micro-batch has its own size; the later ones have gradients of those before."""
    options: dict[str, Any] = {"accumulate_grad_batches": accumulate, "data": texts(lengths_of(36))}
    own = Ends(**options)
    for share in (0.03, 0.5):
        model, batches = train(PartialCheckpoint(budget=own.budget(share)), **options)
        assert_same(state_of(model), own.state)
        assert max(batches.peaks) <= own.budget(share)
        assert 0 in own.recomputed(batches)
        assert own.recomputed(batches)[:accumulate] == [4] * accumulate


def test_a_later_micro_batch_is_measured_apart() -> None:
    """It has the gradients of those before it, whatever is known of a first one of its size."""
    data = texts([8, 8, 40, 8, 8, 40, 40, 40])
    _, batches = train(PartialCheckpoint(budget="1GiB"), data=data, accumulate_grad_batches=2)
    assert batches.recomputes == [8, 8, 8, 4, 4, 8, 4, 4]


def test_accumulation_that_begins_later() -> None:
    options: dict[str, Any] = {"max_epochs": 3, "data": texts([20, 8, 12, 16, 30, 25] * 2)}

    def scheduler() -> Callback:
        return GradientAccumulationScheduler({0: 1, 1: 3})

    plain, peaks = train(scheduler(), **options)
    every = max(train(scheduler(), PartialCheckpoint(), **options)[1].peaks)
    budget = (every + max(peaks.peaks)) // 2
    model, batches = train(scheduler(), PartialCheckpoint(budget=budget), **options)
    assert_same(state_of(model), state_of(plain))
    assert max(batches.peaks) <= budget


def test_a_strategy_follows_too(ends: Ends) -> None:
    budget = ends.budget(0.3)
    model, batches = train(strategy=PartialCheckpointStrategy(budget=budget))
    assert_same(state_of(model), ends.state)
    assert max(batches.peaks) <= budget
    assert 0 in ends.recomputed(batches)


# --- what the user sees


def shown(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


def test_a_steady_size_is_as_before(ends: Ends, capsys: pytest.CaptureFixture[str]) -> None:
    callback = PartialCheckpoint(budget=10**6)
    plans = []

    class Keeper(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            plans.append(callback.handle.plan)  # type: ignore[union-attr]

    _, batches = train(callback, Keeper(), data=texts([24] * 8))
    out = shown(capsys)
    assert out.count("PartialCheckpoint:") == 2
    assert "batches" not in out
    assert all(plan is plans[1] for plan in plans[1:])
    assert len(set(batches.recomputes[1:])) == 1
    assert batches.recomputes[0] == 8


def test_what_is_said_and_logged(
    ends: Ends, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusing = Refusing()
    refusing.log_hyperparams = lambda params: refusing.taken.append(params)  # type: ignore[method-assign, assignment]
    callback = PartialCheckpoint(budget=ends.budget(0.02))
    csv = CSVLogger(tmp_path)
    _, batches = train(callback, logger=[csv, refusing], log_every_n_steps=1)
    out = shown(capsys)
    assert out.count("batches differ in size: from here on each has the fastest plan") == 1
    counts = re.findall(
        r"batches by size: (\d+) with no block recomputed, (\d+) with some, (\d+) with all, and "
        r"(\d+) measured\. The largest had tensors of \(4, (\d+)\)",
        out,
    )
    none, some, every, measured, longest = map(int, counts[0])
    again = ends.recomputed(batches)
    assert again.count(0) == none
    assert none + some + every + measured == len(LENGTHS)
    assert 4 <= measured <= 12
    assert longest == max(LENGTHS)
    assert [list(params) for params in refusing.taken] == [
        ["partial_checkpoint"],
        ["partial_checkpoint_largest_batch"],
    ]
    last = refusing.taken[1]["partial_checkpoint_largest_batch"]
    assert last["batches"] == {"none": none, "some": some, "all": every, "measured": measured} or (
        sum(last["batches"].values()) == len(LENGTHS)
    )
    assert any(block["action"] != "keep" for block in last["plan"]["blocks"])
    assert out.count("PartialCheckpoint:") == 3, "a table for the step that is measured, the first "
    assert "partial_checkpoint_largest_batch" in next(tmp_path.rglob("hparams.yaml")).read_text()


def test_a_checkpoint_has_the_plan_of_the_largest(tmp_path: Path, ends: Ends) -> None:
    path = tmp_path / "last.ckpt"

    class Saver(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            if batch_idx == len(LENGTHS) - 1:
                trainer.save_checkpoint(path)

    data = [*TEXTS[:-1], texts([3])[0]]
    _, batches = train(PartialCheckpoint(budget=ends.budget(0.02)), Saver(), data=data)
    assert batches.recomputes[-1] == 4, "the last batch is short, and keeps all"
    saved = torch.load(path, weights_only=False)["partial_checkpoint"]
    assert any(block["action"] != "keep" for block in saved["blocks"])


@pytest.mark.parametrize("monitor_first", [False, True])
def test_the_monitor_shows_the_plans_that_were_in_force(ends: Ends, monitor_first: bool) -> None:
    """Not that of the last batch alone, which is short: the peak is of a long one."""
    monitor = PeakMemoryMonitor(first_steps=None)
    callbacks = [PartialCheckpoint(budget=ends.budget(0.02)), monitor]
    data = [*TEXTS[:-1], texts([3])[0]]
    _, batches = train(*callbacks[:: -1 if monitor_first else 1], data=data)
    assert batches.recomputes[-1] == 4, "the last batch is short, and keeps all"
    (row,) = monitor.summary()
    assert row["plan"] == "0 to 4 of 4 blocks recomputed"
    assert row["peak_allocated_MiB"] * 2**20 == max(batches.peaks)


def test_the_monitor_shows_what_was_measured_as_measured(ends: Ends) -> None:
    """In an epoch of one step every block was recomputed, whatever holds from the next on."""
    monitor = PeakMemoryMonitor()
    train(PartialCheckpoint(budget=2 * ends.high), monitor, data=TEXTS[:1], max_epochs=2)
    assert [row["plan"] for row in monitor.summary()] == [
        "4 of 4 blocks recomputed",
        "0 of 4 blocks recomputed",
    ]


def test_a_batch_that_fits_no_plan_is_named(ends: Ends) -> None:
    """After it was measured, as the first would be; the shorter ones before it were trained."""
    lengths = [16, 8, 12, 10, 14, 60, 8]
    small = Ends(data=texts(lengths[:5]))
    with pytest.raises(ValueError, match=r"less than any plan needs for a batch with") as caught:
        train(PartialCheckpoint(budget=small.high), data=texts(lengths))
    assert "(4, 60)" in str(caught.value)
    assert mode_stack._entered == []
    assert watchers._watchers == []


# --- where one plan holds for all


@pytest.mark.parametrize("accumulate", [1, 2])
def test_compiled_parts_fix_the_plan(
    accumulate: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a device; a CPU refuses them. Each other plan would be compiled anew."""
    monkeypatch.setattr(budgeting, "find_compiled", lambda module: "layers.0 (Block)")
    data = texts([40, 10, 40, 8, 20, 30])
    budget = Ends(data=data).budget(0.4)
    _, batches = train(
        PartialCheckpoint(budget=budget), data=data, accumulate_grad_batches=accumulate
    )
    assert len(set(batches.recomputes[accumulate:])) == 1
    assert batches.recomputes[0] == 8
    assert max(batches.peaks) <= budget
    out = shown(capsys)
    assert "layers.0 (Block) is compiled" in out
    assert "the first step's plan holds for batches of any size" in out
    assert "batches by size" not in out


class Iterating(Lit):
    """Takes its batches itself, so that nobody knows their size before the step."""

    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def test_a_module_that_takes_its_batches_itself(capsys: pytest.CaptureFixture[str]) -> None:
    data = texts([40, 10, 20, 40, 8, 30])
    _, batches = train(PartialCheckpoint(budget="1GiB"), make=Iterating, data=data)
    assert batches.recomputes == [8, *[4] * 5]
    assert "takes a dataloader_iter" in shown(capsys)


class WithText(Lit):
    """Its batches hold no tensors."""

    def training_step(self, batch: list[int], batch_idx: int) -> Tensor:  # type: ignore[override]
        return super().training_step(torch.tensor([batch]) % VOCABULARY, batch_idx)


def test_batches_without_tensors_have_one_plan() -> None:
    data = [list(range(length)) for length in (40, 10, 20)]
    _, batches = train(PartialCheckpoint(budget="1GiB"), make=WithText, data=data)
    assert batches.recomputes == [8, 4, 4]


# --- a fit that ends, fails, goes on


def test_two_fits_and_a_resumed_one_measure_anew(tmp_path: Path, ends: Ends) -> None:
    callback = PartialCheckpoint(budget=ends.budget(0.4))
    model, batches = Lit(), Batches()
    trainer = trainer_of(callback, batches, max_epochs=1)
    before = list(trainer.callbacks)  # type: ignore[attr-defined]
    for _ in range(2):
        trainer.fit_loop.epoch_progress.reset()
        trainer.fit(model, loader_of(TEXTS))
        assert trainer.callbacks == before  # type: ignore[attr-defined]
        assert not any(map(is_swapped, model.modules()))
    firsts = [batches.recomputes[0], batches.recomputes[len(TEXTS)]]
    assert firsts == [8, 8]
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    own = Batches()
    trainer = trainer_of(PartialCheckpoint(budget=ends.budget(0.4)), own, max_epochs=2)
    more = {"weights_only": False} if "weights_only" in trainer.fit.__code__.co_varnames else {}
    trainer.fit(Lit(), loader_of(TEXTS), ckpt_path=tmp_path / "last.ckpt", **more)
    assert own.recomputes[0] == 8
    assert min(own.recomputes) == 4
    assert max(own.peaks) <= ends.budget(0.4)


class Failing(Lit):
    """Fails in the longest batch, which is measured."""

    def on_after_backward(self) -> None:
        if self.trainer.global_step == 3:
            raise RuntimeError("in a measured step")


def test_nothing_is_left_after_an_error_in_a_later_measured_step() -> None:
    model = Failing()
    trainer = trainer_of(PartialCheckpoint(budget="1GiB"))
    with pytest.raises(RuntimeError, match="in a measured step"):
        trainer.fit(model, loader_of(texts([8, 9, 10, 20])))
    assert mode_stack._entered == []
    assert watchers._watchers == []
    assert len(trainer.callbacks) == 1  # type: ignore[attr-defined]
    assert not any(map(is_swapped, model.modules()))


class Growing(Lit):
    """Gets another block in its second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers.append(Block())


def test_other_blocks_are_measured_anew() -> None:
    data = texts([20, 8, 12, 16, 10, 20])
    _, batches = train(PartialCheckpoint(budget="1GiB"), make=Growing, data=data, max_epochs=2)
    first, second = batches.recomputes[:6], batches.recomputes[6:]
    assert first[0] == second[0] == 8
    assert first[-1] == second[-1] == 4


class Skipping(Lit):
    """Ends its first epoch before the step of a batch that would be measured."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None


def test_a_batch_that_begins_and_does_not_run() -> None:
    """It is not taken for measured."""
    callback, recomputed = PartialCheckpoint(budget="1GiB"), []

    class Reader(Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            recomputed.append(callback.handle.plan.num_recomputed)  # type: ignore[union-attr]

    trainer = trainer_of(callback, Reader(), max_epochs=2)
    trainer.fit(Skipping(), loader_of(texts([8, 9, 30, 10, 30])))
    assert recomputed == [4, 4, 0, 0, 4, 0, 0]
    assert mode_stack._entered == []
    assert watchers._watchers == []


def test_verified_too(ends: Ends) -> None:
    budget = ends.budget(0.5)
    model, batches = train(PartialCheckpoint(budget=budget, verify=True))
    assert_same(state_of(model), ends.state)
    assert max(batches.peaks[1:]) <= budget  # the first has the steps of verify in it


# --- ranks: run by each of a pair, from test_strategies.py


class Joined(Lit):
    """Takes its rows in parts, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        whole = batch if isinstance(batch, Tensor) else torch.cat(batch)
        return super().training_step(whole, batch_idx)


def _pair(data: Sequence[Any], budget: int | str) -> list[Any]:
    """What both ranks did: executions and peaks of each batch, and the weights."""
    seed_all(0)
    model, batches = Joined(), Batches()
    # Views: the reducer's buckets are the gradients then, and nothing beside them.
    strategy = PartialCheckpointDDPStrategy(budget=budget, gradient_as_bucket_view=True)
    options: dict[str, Any] = {"strategy": strategy, "devices": 2, "max_epochs": 1}
    trainer = trainer_of(batches, use_distributed_sampler=False, **options)
    trainer.fit(model, loader_of(data))
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (batches.recomputes, batches.peaks, state_of(model)))
    return found


def lengths_on_two_ranks() -> None:
    """Both take the plan, or measure, for the larger of their batches."""
    rank = dist.get_rank()
    first = lengths_of(30, seed=5)
    second = [
        max(2, length // 2) if index % 2 else length + 9 for index, length in enumerate(first)
    ]
    data = texts([first, second][rank])
    budget = 780_000
    (counts, peaks, weights), (other_counts, other_peaks, other_weights) = _pair(data, budget)
    assert counts == other_counts
    assert counts[0] == 8
    assert 4 in counts
    assert max(peaks + other_peaks) <= budget
    assert 8 in counts[6:] or max(counts[6:]) > 4, "the budget asks for recomputes"
    assert_same(weights, other_weights)


def unlike_batches_on_two_ranks() -> None:
    """Where the ranks' batches have not the same parts they are measured, on both."""
    rank = dist.get_rank()
    lengths = [20, 8, 12, 16, 10, 14, 8, 9]  # the last but one is known on rank 0
    data: list[Any] = texts(lengths)
    if rank == 1:
        data[6] = [data[6][:2], data[6][2:]]
    (counts, _, weights), (other_counts, _, other_weights) = _pair(data, "1GiB")
    assert counts == other_counts
    assert counts[5:] == [4, 8, 4]
    assert_same(weights, other_weights)


def crossed_batches_on_two_ranks() -> None:
    """No rank ever has a batch with the sides of both, or the same parts as the other's, and still
    they are not measured again and again."""
    rank = dist.get_rank()
    wide: list[Any] = texts([20] * 6, 4) if rank == 0 else texts([10] * 6, 8)
    parts: list[Any] = [[t[:2], t[2:]] if rank else t for t in texts([20, 12, 20, 12, 20, 12])]
    for data, num_measured in ((wide, 2), (parts, 3)):
        (counts, _, weights), (other_counts, _, other_weights) = _pair(data, "1GiB")
        assert counts == other_counts
        assert counts == [8] * num_measured + [4] * (6 - num_measured)
        assert_same(weights, other_weights)
