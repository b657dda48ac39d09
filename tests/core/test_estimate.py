"""What fake tensors say of a step is what a real one says."""

from __future__ import annotations

import io
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import adam, seed_all
from rich.console import Console
from test_measure import MODELS, Language, tokens
from torch import Tensor, nn

from lightning_ckpt import draw_estimate, estimate, print_estimate
from lightning_ckpt.core.budget.clock import Clock, CostClock
from lightning_ckpt.core.budget.costs import predict
from lightning_ckpt.core.estimate import Estimate, measure_step
from lightning_ckpt.core.memory import peak_tracker, track_peak


def step(module: nn.Module, batch: Tensor) -> Tensor:
    return module(batch)


@pytest.mark.parametrize("name", MODELS)
def test_fake_tensors_say_what_real_ones_do(name: str) -> None:
    """Peaks of plain training and of every block recomputed, with the optimizer, within 2 %."""
    factory, make_batch = MODELS[name]
    seed_all(0)
    model, batch = factory(), make_batch()
    found = estimate(model, batch, optimizers=adam)
    optimizer = adam(model)
    for _ in range(2):
        real = measure_step(
            model, batch, step, [optimizer], tracker=peak_tracker("cpu"), clock=Clock("cpu")
        )
    for action in ("recompute", "keep"):
        actions: Any = [action] * len(real.names)
        fake_peak, real_peak = predict(found.step, actions).peak, predict(real, actions).peak
        assert fake_peak == pytest.approx(real_peak, rel=0.02)
    assert found.step.terms == pytest.approx(real.terms, rel=0.01, abs=1024)


def test_the_real_step_has_the_estimated_peak() -> None:
    seed_all(0)
    model, batch = Language(vocabulary=2000), tokens()
    found = estimate(model, batch, optimizers=adam)
    optimizer = adam(model)
    with track_peak(model, batch) as tracker:
        for _ in range(2):
            tracker.reset_peak()
            loss = model(batch)
            model.zero_grad()
            loss.backward()
            optimizer.step()
            del loss
    plain = found.every_n[0]
    assert plain.label == "plain"
    assert tracker.peak_bytes <= plain.peak <= 1.02 * tracker.peak_bytes


@pytest.fixture(scope="module")
def found() -> Estimate:
    return estimate(Language(), tokens(), ["100MiB", "1KiB", 2_000_000])


def test_the_front_and_the_intervals(found: Estimate) -> None:
    """Each interval is there; no point of the front is beaten, by an interval or another one."""
    assert [point.label for point in found.every_n] == [
        "plain",
        *(f"every_n={n}" for n in (4, 3, 2, 1)),
    ]
    assert found.every_n[0].relative_time == pytest.approx(1)
    assert found.every_n[-1].relative_time > 1.1
    front = [(point.peak, point.relative_time) for point in found.front]
    assert front == sorted(front)
    assert [time for _, time in front] == sorted((time for _, time in front), reverse=True)
    for interval in found.every_n:
        fits = [time for peak, time in front if peak <= interval.peak]
        assert min(fits) <= interval.relative_time + 1e-9
    assert front[0][0] <= min(point.peak for point in found.every_n)


def test_no_budgets_choice_is_below_the_front() -> None:
    """Wherever it lies between the budgets that the front is made of."""
    budgets = [1_500_000 + 13_579 * index for index in range(20)]
    found = estimate(Language(), tokens(), budgets)
    front = [(point.peak, point.relative_time) for point in found.front]
    for point in found.budgets:
        assert (point.peak, point.relative_time) in front


def test_budgets(found: Estimate) -> None:
    large, small, middle = found.budgets
    assert (large.label, small.label) == ("budget=100MiB", "budget=1KiB")
    assert large.plan is not None
    assert large.plan.num_recomputed == 0
    assert small.plan is None
    assert small.peak == found.front[0].peak
    assert middle.plan is not None
    assert middle.peak <= 2_000_000


def test_nothing_of_the_model_is_touched() -> None:
    model = Language()
    before = [(id(p), p.clone()) for p in model.parameters()]
    classes = [type(m) for m in model.modules()]
    estimate(model, tokens())
    assert [id(p) for p in model.parameters()] == [key for key, _ in before]
    assert all(torch.equal(p, old) for p, (_, old) in zip(model.parameters(), before, strict=True))
    assert all(p.grad is None for p in model.parameters())
    assert [type(m) for m in model.modules()] == classes


def test_a_model_on_the_meta_device() -> None:
    """Weights of 40 GB, on any machine."""
    with torch.device("meta"):
        model = nn.Module()
        model.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(50_000, 50_000), nn.Tanh()) for _ in range(4)
        )
    found = estimate(model, torch.ones(8, 50_000), step=_stack_step)
    assert found.step.terms["parameters and buffers"] == 4 * 4 * (50_000**2 + 50_000)
    assert found.step.terms["gradients"] == 4 * 4 * (50_000**2 + 50_000)


def _stack_step(module: Any, x: Tensor) -> Tensor:
    for layer in module.layers:
        x = layer(x)
    return x.sum()


def test_tied_weights_stay_tied() -> None:
    model = Language(vocabulary=64)
    model.head.weight = model.embed.weight
    found = estimate(model, tokens())
    unique = sum(p.nbytes for p in model.parameters())
    assert found.step.terms["parameters and buffers"] == unique


class Configured(Language):
    """Looks like a LightningModule."""

    def training_step(self, batch: Tensor, batch_idx: int) -> dict[str, Tensor]:
        return {"loss": self(batch)}

    def configure_optimizers(self) -> Any:
        return {"optimizer": adam(self), "lr_scheduler": None}


class Listed(Configured):
    def configure_optimizers(self) -> Any:
        return [adam(self)], []


class OnlyBatch(Configured):
    """Lightning passes no number to a step that takes none, and warns that nothing is logged."""

    def training_step(self, batch: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        warnings.warn("You are trying to `self.log()` but ...", stacklevel=1)
        return super().training_step(batch, 0)


class Indexed(Configured):
    """Takes the number under another name, and that of a data loader, which nobody gives."""

    def training_step(self, batch: Tensor, i: int, dataloader_idx: int = 0) -> Any:  # type: ignore[override]
        assert (i, dataloader_idx) == (0, 0)
        return super().training_step(batch, i)


class Open(Configured):
    def training_step(self, *args: Any) -> Any:  # type: ignore[override]
        batch, index = args
        return super().training_step(batch, index)


@pytest.mark.parametrize("kind", [Configured, Listed, OnlyBatch, Indexed, Open])
def test_the_modules_own_step_and_optimizers(kind: type[Language]) -> None:
    terms = estimate(kind(), tokens()).step.terms
    assert terms["optimizer states"] == pytest.approx(2 * terms["gradients"], rel=0.01)
    assert estimate(Language(), tokens()).step.terms["optimizer states"] == 0


def test_a_step_without_a_loss() -> None:
    with pytest.raises(ValueError, match=r"has no tensor that needs a gradient; pass step="):
        estimate(_NoLoss(), tokens())
    with pytest.raises(TypeError, match="gave no loss but None; pass step="):
        estimate(_NoLossStep(), tokens())
    by_hand = Configured()
    by_hand.automatic_optimization = False  # type: ignore[assignment]
    with pytest.raises(TypeError, match=r"optimizes by hand.*pass step="):
        estimate(by_hand, tokens())


class _NoLoss(Language):
    def forward(self, x: Tensor) -> Any:  # type: ignore[override]
        super().forward(x)
        return "done"


class _NoLossStep(Configured):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:  # type: ignore[override]
        self(batch)


@pytest.mark.parametrize("budget", ["auto", 0.5, "much"])
def test_budgets_must_be_bytes(budget: Any) -> None:
    with pytest.raises(ValueError, match="budget"):
        estimate(Language(), tokens(), [budget])


@pytest.mark.parametrize("argument", ["step", "optimizers"])
def test_what_is_no_function(argument: str) -> None:
    model = Language()
    for value in (3, nn.MSELoss(), torch.optim.SGD(model.parameters())):
        with pytest.raises(TypeError, match=f"^{argument} must be a function, got "):
            estimate(model, tokens(), **{argument: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("model", [None, Language, "model"])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(TypeError, match=r"module must be a torch\.nn\.Module, got"):
        estimate(model, tokens())


@pytest.mark.parametrize("loss", [None, 1.0, torch.ones(2, 3)])
def test_a_step_of_ones_own_without_a_loss(loss: Any) -> None:
    with pytest.raises(ValueError, match=r"^the loss must be .*got [N1a][^\[]*pass step=lambda"):
        estimate(Language(), tokens(), step=lambda module, batch: loss)


@pytest.mark.parametrize("budgets", ["60GiB", 10**9, 0.9])
def test_one_budget_is_no_list(budgets: Any) -> None:
    with pytest.raises(TypeError, match=re.escape(f"pass budgets=[{budgets!r}]")):
        estimate(Language(), tokens(), budgets)


@pytest.mark.parametrize(
    ("value", "error"),
    [("fast", TypeError), (None, TypeError), (0, ValueError), (-1.0, ValueError)],
)
@pytest.mark.parametrize("name", ["flops", "bytes", "link_bytes"])
def test_a_speed_is_above_zero(name: str, value: Any, error: type[Exception]) -> None:
    speed: Any = {f"{name}_per_second": value}
    with pytest.raises(error, match=f"{name}_per_second must be .*, got {value!r}"):
        estimate(Language(), tokens(), **speed)


def test_the_clock_goes_by_products_and_by_bytes() -> None:
    clock = CostClock("cpu", flops_per_second=1000, bytes_per_second=1e30)
    x = torch.ones(2, 3)
    clock.advance(torch.ops.aten.mm.default, (x, x.t()), {}, x @ x.t())
    assert clock.mark() == pytest.approx(2 * 2 * 3 * 2 / 1000)
    clock = CostClock("cpu", flops_per_second=1e30, bytes_per_second=10)
    clock.advance(torch.ops.aten.add.Tensor, (x, x), {}, x + x)
    assert clock.mark() == pytest.approx(3 * 24 / 10)
    clock.advance(torch.ops.aten.t.default, (x,), {}, x.t())
    assert clock.mark() == pytest.approx(3 * 24 / 10), "a view costs nothing"


def test_the_table(found: Estimate) -> None:
    console = Console(file=io.StringIO(), width=100)
    print_estimate(found, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for expected in ("plain", "every_n=2", "budget=100MiB", "needs", "1.000"):
        assert expected in text


def test_the_picture(found: Estimate, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "plans.svg"
    draw_estimate(found, path)
    text = path.read_text()
    assert text.count("<path") > 20
    assert "peak memory" in text or "<defs" in text
