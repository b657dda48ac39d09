"""What plans would cost, before there is a device, or a model with values.

The same measurement as in a first training step, taken on fake tensors: they have shapes and no
values, so a model that is too large to build takes seconds. Peaks are those of live tensor bytes.
Times go by what is computed, on a device of a given speed, and are only good to compare.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ckpt.core.apply import apply_quietly
from lightning_ckpt.core.blocks import check_module
from lightning_ckpt.core.budget import fastest, least_peak, plan_of
from lightning_ckpt.core.budget.clock import Clock, CostClock
from lightning_ckpt.core.budget.costs import Actions, Measurement, Prediction, predict
from lightning_ckpt.core.budget.measure import StepRecorder
from lightning_ckpt.core.budget.waiting import Link
from lightning_ckpt.core.budget.weighing import LinkProbe, choices_with, weighed
from lightning_ckpt.core.budget.words import BudgetTooSmall, budget_bytes, read_budget
from lightning_ckpt.core.fake import fake_batch, fake_module, without_values
from lightning_ckpt.core.loss import (
    check_function,
    check_loss,
    model_loss,
    training_step_loss,
    why_no_training_step,
)
from lightning_ckpt.core.memory.live_bytes import LiveBytes
from lightning_ckpt.core.memory.peak import PeakTracker
from lightning_ckpt.core.offload import OffloadConfig
from lightning_ckpt.core.plan import BlockPlan, Place, Plan, choice_of, every_n_plan
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
    offload: OffloadConfig | None = None,
    link: Link | None = None,
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
        offload: says what would be too small to offload.
        link: the way to where it would wait; None: it is measured, if `offload` is given.
    """
    probe = LinkProbe(offload) if offload is not None and link is None else None
    min_bytes = OffloadConfig.min_bytes if offload is None else offload.min_bytes
    with apply_quietly(module, 1, False, layers) as handle, ExitStack() as stack:
        recorder = StepRecorder(module, handle.modules, tracker, clock, min_bytes)
        stack.callback(recorder.stop)
        stack.enter_context(watching(recorder.watch))
        recorder.resume(batch, optimizers=optimizers)
        loss = step(module, batch)
        check_loss(loss, argument="step")
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
        link = probe.link(recorder.largest_bytes(), clock) if probe else link
        return recorder.finish(
            names, class_names, optimizers, holds_grads=bool(optimizers), link=link
        )


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
    offload: bool | str | OffloadConfig = False,
    link_bytes_per_second: float = 25e9,
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
        offload: what the planner may offload, as `PartialCheckpoint` takes it beside a budget.
        link_bytes_per_second: speed of the way to where it would wait, in each direction: some
            25e9 for pinned memory of the host, 2e9 for a good disk.

    Returns:
        Plain data; `print_estimate` shows it as a table, `draw_estimate` as a picture.

    Raises:
        TypeError, ValueError: an argument is impossible, no block was found, or a step gives
            no loss.
    """
    config = weighed(offload)
    check_module(module)
    check_function("step", step, "module, batch: ...")
    check_function("optimizers", optimizers, "module: torch.optim.AdamW(module.parameters())")
    _check_speed("flops_per_second", flops_per_second)
    _check_speed("bytes_per_second", bytes_per_second)
    _check_speed("link_bytes_per_second", link_bytes_per_second)
    room = config.max_host_bytes if config is not None and config.target == "host" else None
    asked = _asked(budgets)
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
            offload=config,
            link=Link(link_bytes_per_second, link_bytes_per_second, room_bytes=room),
        )
    allowed, place = choices_with(config), config.target if config else None
    return Estimate(
        measured,
        tuple(_intervals(measured)),
        tuple(_front(measured, allowed, place, [budget for _, budget in asked])),
        tuple(_within(measured, f"budget={w}", budget, allowed, place) for w, budget in asked),
    )


def _check_speed(name: str, value: Any) -> None:
    """Refuse it here: an error in the middle of a followed backward ends the process."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {value!r}; such as 25e9")
    if not value > 0:
        raise ValueError(f"{name} must be above 0, got {value}")


def _asked(budgets: Any) -> list[tuple[str, int]]:
    """Each budget in the user's word, and its bytes."""
    if isinstance(budgets, (str, int, float)):
        raise TypeError(f"budgets must be a list, got {budgets!r}; pass budgets=[{budgets!r}]")
    return [(str(b), budget_bytes(read_budget(b), torch.device("cpu"))) for b in budgets]


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


def _front(
    step: Measurement, actions: Actions, place: Place | None, asked: Sequence[int]
) -> Iterable[Point]:
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
            yield _point(step, "planned", plan_of(step, chosen, place))


def _within(
    step: Measurement, label: str, budget: int, actions: Actions, place: Place | None
) -> Point:
    try:
        return _point(step, label, plan_of(step, fastest(step, budget, actions), place))
    except BudgetTooSmall as error:
        return Point(label, None, error.least, float("nan"))


def _point(step: Measurement, label: str, plan: Plan) -> Point:
    predicted = predict(step, [choice_of(block) for block in plan])
    return Point(label, plan, predicted.peak, predicted.seconds / _plain_seconds(step))


def _plain_seconds(step: Measurement) -> float:
    every: Prediction = predict(step, ["recompute"] * len(step.names))
    return step.seconds - every.recompute_seconds
