"""What plans would cost, before there is a device, or a model with values.

The same measurement as in a first training step, taken on fake tensors: they have shapes and no
values, so a model that is too large to build takes seconds. Peaks are those of live tensor bytes.
Times go by what is computed, on a device of a given speed, and are only good to compare.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple, get_args

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ckpt.core.apply import apply_quietly
from lightning_ckpt.core.budget import (
    BudgetTooSmall,
    budget_bytes,
    fastest,
    least_peak,
    read_budget,
)
from lightning_ckpt.core.clock import Clock, CostClock
from lightning_ckpt.core.costs import Actions, Measurement, Prediction, predict
from lightning_ckpt.core.fake import fake_batch, fake_module, without_values
from lightning_ckpt.core.live_bytes import LiveBytes
from lightning_ckpt.core.loss import model_loss, training_step_loss, why_no_training_step
from lightning_ckpt.core.measure import StepRecorder
from lightning_ckpt.core.peak import PeakTracker
from lightning_ckpt.core.plan import Action, BlockPlan, Plan, every_n_plan
from lightning_ckpt.core.watchers import watching

Step = Callable[[nn.Module, Any], Any]
_NUM_FRONT = 48  # budgets between the least and plain training's need


class Point(NamedTuple):
    """One plan and what it is predicted to cost.

    Attributes:
        label: what it came from.
        plan: the plan; None where nothing fits the budget.
        peak: bytes; where nothing fits, the least that any plan needs.
        relative_time: of a step, against plain training.
    """

    label: str
    plan: Plan | None
    peak: int
    relative_time: float


class Estimate(NamedTuple):
    """What `estimate` found.

    Attributes:
        step: the measured step.
        every_n: plain training, and each interval.
        front: the planner's plans, from the least memory to the least time.
        budgets: its choice for each given budget.
    """

    step: Measurement
    every_n: tuple[Point, ...]
    front: tuple[Point, ...]
    budgets: tuple[Point, ...]


def measure_step(
    module: nn.Module,
    batch: Any,
    step: Step,
    optimizers: Sequence[Optimizer] = (),
    *,
    layers: Any = None,
    tracker: PeakTracker,
    clock: Clock,
) -> Measurement:
    """Take one training step of `module` with every block recomputed, and say what it cost.

    The step forgets the gradients after its forward, as Lightning does, so the measurement is that
    of a step which still has those of the step before in its forward.

    Args:
        module: the model. Its gradients are those of the step afterwards.
        batch: what `step` gets.
        step: `step(module, batch)` gives the loss.
        optimizers: that step afterwards.
        layers: which modules are the blocks, as in `apply_partial_checkpoint`.
        tracker: tells bytes, such as `memory.peak_tracker(device)`.
        clock: tells times, such as `clock.Clock(device)`.
    """
    with apply_quietly(module, 1, False, layers) as handle, ExitStack() as stack:
        recorder = StepRecorder(module, handle.modules, tracker, clock)
        stack.callback(recorder.stop)
        stack.enter_context(watching(recorder.watch))
        recorder.resume(batch, optimizers=optimizers)
        loss = step(module, batch)
        recorder.mark("zero_grad")
        module.zero_grad()
        loss.backward()
        recorder.mark("optimizer")
        for optimizer in optimizers:
            optimizer.step()
        del loss
        recorder.pause()
        names = [block.name for block in handle.plan]
        class_names = [block.class_name for block in handle.plan]
        return recorder.finish(names, class_names, optimizers, holds_grads=bool(optimizers))


def estimate(
    module: nn.Module,
    batch: Any,
    budgets: Iterable[Any] = (),
    *,
    step: Step | None = None,
    optimizers: Callable[[nn.Module], Any] | None = None,
    layers: Any = None,
    flops_per_second: float = 300e12,
    bytes_per_second: float = 2e12,
) -> Estimate:
    """Say what each interval, and the plan for each budget, would cost, without computing anything.

        with torch.device("meta"):
            model = Model(num_layers=80, width=8192)
        print_estimate(estimate(model, batch, budgets=["60GiB", "80GiB"]))

    Args:
        module: the model; its parameters may be on the meta device. It is not changed.
        batch: as a training step gets it; its shapes count, and the values of whole numbers, of
            which a model may make a mask.
        budgets: as `PartialCheckpoint` takes them, in bytes.
        step: `step(module, batch)` gives the loss; by default that of the module's own
            `training_step`, or else of its call with the batch (a mapping as keyword arguments, a
            tuple or list as positional ones): its result's `loss`, the result if it is one element,
            or the mean square of it.
        optimizers: makes them; by default the module's `configure_optimizers()`, if it has one.
        layers: which modules are the blocks, as in `apply_partial_checkpoint`.
        flops_per_second: speed of the device in matrix products.
        bytes_per_second: speed of its memory.

    Returns:
        Plain data; `print_estimate` shows it as a table, `draw_estimate` as a
        picture.

    Raises:
        TypeError, ValueError: a budget or `layers` is impossible, no block was found, or a step
            gives no loss.
    """
    asked = [(str(b), budget_bytes(read_budget(b), torch.device("cpu"))) for b in budgets]
    with without_values():
        fake = fake_module(module)
        made = _optimizers(fake, optimizers)
        measured = measure_step(
            fake,
            fake_batch(batch),
            step or _default_step,
            made,
            layers=layers,
            tracker=LiveBytes("meta", "cpu"),
            clock=CostClock("cpu", flops_per_second, bytes_per_second),
        )
    return Estimate(
        measured,
        tuple(_intervals(measured)),
        tuple(_front(measured, [budget for _, budget in asked])),
        tuple(_within(measured, f"budget={word}", budget) for word, budget in asked),
    )


def _default_step(module: Any, batch: Any) -> Tensor:
    if not hasattr(module, "training_step"):
        return model_loss(module, batch, argument="step")
    if reason := why_no_training_step(module):
        raise TypeError(
            f"{type(module).__name__} {reason}, so its training step cannot be run by itself; pass "
            "step=lambda module, batch: ..."
        )
    with warnings.catch_warnings():  # a module without a trainer says so at each `self.log`
        warnings.filterwarnings("ignore", r"You are trying to `self\.log\(\)`")
        loss = training_step_loss(module, batch)
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        raise TypeError(
            f"the training step of {type(module).__name__} gave no loss but {loss!r}; pass "
            "step=lambda module, batch: ..."
        )
    return loss


def _optimizers(module: nn.Module, make: Callable[[nn.Module], Any] | None) -> list[Optimizer]:
    """What `make`, or `configure_optimizers` in any of its forms, gives."""
    if make is None and not hasattr(module, "configure_optimizers"):
        return []
    return list(_found((make or _configured)(module)))


def _configured(module: Any) -> Any:
    return module.configure_optimizers()


def _found(value: Any) -> Iterable[Optimizer]:
    if isinstance(value, Optimizer):
        yield value
    elif isinstance(value, dict):
        yield from _found(value.get("optimizer"))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _found(item)


def _intervals(step: Measurement) -> Iterable[Point]:
    blocks = list(zip(step.names, step.class_names, strict=True))
    plain = Plan(tuple(BlockPlan(*block, "keep") for block in blocks))
    yield _point(step, "plain", plain)
    for every_n in range(len(blocks), 0, -1):
        yield _point(step, f"every_n={every_n}", every_n_plan(blocks, every_n, None))


def _front(step: Measurement, asked: Sequence[int]) -> Iterable[Point]:
    actions = get_args(Action)
    low = predict(step, least_peak(step, actions)).peak
    high = max(low, predict(step, ["keep"] * len(step.names)).peak)
    between = [low + (high - low) * index // _NUM_FRONT for index in range(_NUM_FRONT + 1)]
    like_intervals = [max(low, point.peak) for point in _intervals(step)]
    seen: set[tuple[str, ...]] = set()
    within = [min(budget, high) for budget in asked if budget >= low]
    for budget in sorted({*between, *like_intervals, *within}):
        chosen = fastest(step, budget, actions)
        if tuple(chosen) not in seen:
            seen.add(tuple(chosen))
            yield _point(step, "planned", _plan_of(step, chosen))


def _within(step: Measurement, label: str, budget: int) -> Point:
    try:
        return _point(step, label, _plan_of(step, fastest(step, budget, get_args(Action))))
    except BudgetTooSmall as error:
        return Point(label, None, error.least, float("nan"))


def _plan_of(step: Measurement, actions: Actions) -> Plan:
    blocks = zip(step.names, step.class_names, actions, strict=True)
    return Plan(tuple(BlockPlan(*block) for block in blocks))


def _point(step: Measurement, label: str, plan: Plan) -> Point:
    predicted = predict(step, [block.action for block in plan])
    return Point(label, plan, predicted.peak, predicted.seconds / _plain_seconds(step))


def _plain_seconds(step: Measurement) -> float:
    every: Prediction = predict(step, ["recompute"] * len(step.names))
    return step.seconds - every.recompute_seconds
