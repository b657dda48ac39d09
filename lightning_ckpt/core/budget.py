"""A budget in the user's words, and the fastest plan whose peak is within it."""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import torch

from lightning_ckpt.core.costs import (
    Actions,
    Measurement,
    Prediction,
    choices,
    merged,
    predict,
    with_outputs_held,
    without_outputs_held,
)
from lightning_ckpt.core.plan import Choice, Place, Plan, block_plan, is_offloaded
from lightning_ckpt.core.planner import Needs, needs_of, search

_UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_MARGIN = 0.05  # of the free memory: what "auto" leaves to fragments and to other libraries


class Budget(NamedTuple):
    """How much memory the peak of a step may take.

    Attributes:
        kind: "bytes", "share" of the device's memory, or "auto" (what is free when fit starts).
        amount: how many bytes, or which share.
    """

    kind: str
    amount: float


def read_budget(budget: Any) -> Budget:
    """What the user's word says.

    Args:
        budget: bytes as an int or as a word (`"14GiB"`, `"500 MB"`), a share of the device's
            memory as a float above 0 and up to 1, or "auto".

    Raises:
        TypeError: it is of another kind.
        ValueError: it is a word that is not known, or a number that is impossible.
    """
    forms = "use bytes ('14GiB', 500_000_000), a share of the device (0.9), or 'auto'"
    if isinstance(budget, str):
        if budget == "auto":
            return Budget("auto", 0)
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]+)\s*", budget)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"budget={budget!r} is not known; {forms}")
        return _positive(Budget("bytes", int(float(match[1]) * unit)), budget, forms)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"budget must be a number or a word, got {budget!r}; {forms}")
    if isinstance(budget, int):
        return _positive(Budget("bytes", budget), budget, forms)
    if not 0 < budget <= 1:
        raise ValueError(f"budget={budget!r} is no share of a device; {forms}")
    return Budget("share", budget)


def _positive(read: Budget, budget: Any, forms: str) -> Budget:
    if read.amount < 1:
        raise ValueError(f"budget={budget!r} must be above 0; {forms}")
    return read


def budget_bytes(budget: Budget, device: torch.device) -> int:
    """How many bytes that is on `device`, now.

    Raises:
        ValueError: a share of, or what is free on, a device that does not say how much it has.
    """
    if budget.kind == "bytes":
        return int(budget.amount)
    word = "'auto'" if budget.kind == "auto" else repr(budget.amount)
    memory: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(memory, "mem_get_info"):
        raise ValueError(
            f"budget={word} needs a device that knows how much memory it has, and this is "
            f"{device.type}; give bytes, such as budget='4GiB'"
        )
    free, total = memory.mem_get_info(device)
    if budget.kind == "share":
        return int(budget.amount * total)
    # What our allocator has taken from the device is not free there, and ours all the same.
    return int((1 - _MARGIN) * (free + memory.memory_reserved(device)))


class BudgetTooSmall(ValueError):
    """No plan is within the budget.

    Attributes:
        budget: bytes that were given.
        least: bytes that would do.
        terms: what the peak of the least plan is made of, bytes by name, the largest first.
        with_offload: bytes that would do with all of offload, if that was not allowed and is less.
        way: words for how that is allowed.
        batch: the one that it is about, in words.
    """

    def __init__(
        self,
        budget: int,
        least: int,
        terms: dict[str, int],
        batch: str = "",
        with_offload: int | None = None,
        way: str = "",
    ) -> None:
        self.budget, self.least, self.terms = budget, least, terms
        self.with_offload, self.way = with_offload, way
        largest = ", ".join(f"{name} {format_bytes(n)}" for name, n in list(terms.items())[:3])
        hint = ""
        if with_offload is not None:
            hint = f"; with {way} {format_bytes(with_offload, up=True)} would do"
        super().__init__(
            f"budget={format_bytes(budget)} is less than any plan needs"
            f"{batch and ' for a batch with '}{batch}: give at least "
            f"{format_bytes(least, up=True)} ({least} bytes){hint}. The largest terms are {largest}"
        )

    def about(self, batch: str) -> "BudgetTooSmall":
        """The same, of a batch in words."""
        args = self.budget, self.least, self.terms, batch, self.with_offload, self.way
        return BudgetTooSmall(*args)


def fastest(step: Measurement, budget: int, allowed: Actions) -> list[Choice]:
    """The choices, one for each block, of the plan that loses least time within `budget`.

    Args:
        step: what was measured.
        budget: bytes that the peak may take.
        allowed: what to choose from; "recompute" always is there.

    Raises:
        BudgetTooSmall: there is no such plan.
    """
    called = {call.block for call in step.calls}
    plain: list[Choice] = ["keep" if b in called else "recompute" for b in range(len(step.names))]
    if "keep" in allowed and predict(step, plain).peak <= budget:
        return plain
    found = [search(needs, budget) for needs in _all_needs(step, allowed)]
    fitting = [each for each in found if each and predict(step, each).peak <= budget]
    if fitting:
        return min(fitting, key=lambda each: predict(step, each).seconds)
    least = least_peak(step, allowed)
    if predict(step, least).peak > budget:
        raise _too_small(step, budget, least, allowed)
    return least


def least_peak(step: Measurement, allowed: Actions) -> list[Choice]:
    """The plan with the smallest peak of all."""
    every: list[Choice] = ["recompute"] * len(step.names)
    found = [every, *(_least_peak(step, needs) for needs in _all_needs(step, allowed))]
    return min(found, key=lambda each: predict(step, each).peak)


def _least_peak(step: Measurement, needs: Needs) -> list[Choice]:
    best: list[Choice] = ["recompute"] * len(step.names)
    low, high = 0, predict(step, best).peak
    while high - low > 1:
        middle = (low + high) // 2
        found = search(needs, middle)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, predict(step, found).peak)
    return best


def _all_needs(step: Measurement, allowed: Actions) -> list[Needs]:
    """What the search is to be tried with: a block's input may be held by the block that gave it as
    well, and then offload frees nothing. Either that is taken for granted, or excluded."""
    able = choices(step, allowed)
    if not any(is_offloaded(choice) for choice in allowed):
        return [needs_of(step, able)]
    sure, apart = with_outputs_held(step, able), without_outputs_held(step, able)
    return [needs_of(sure, able), *([] if apart == able else [needs_of(step, apart)])]


def _too_small(
    step: Measurement, budget: int, least: list[Choice], allowed: Actions
) -> BudgetTooSmall:
    prediction = predict(step, least)
    everything = predict(step, least_peak(step, get_args(Choice))).peak
    terms = terms_of(step, prediction)
    with_offload = everything if everything < prediction.peak else None
    offloads = any(map(is_offloaded, allowed))
    way = "scope='all' in its OffloadConfig" if offloads else "offload= beside it"
    return BudgetTooSmall(budget, prediction.peak, terms, "", with_offload, way)


def terms_of(step: Measurement, prediction: Prediction) -> dict[str, int]:
    """What a peak is made of, the largest first, by what a user can do something about."""
    segment = step.segments[prediction.worst]
    terms = dict(step.terms)
    terms["what blocks keep for backward"] = max(0, segment.start - sum(terms.values()))
    if segment.call is None:
        place = "operations outside of blocks, or a block's backward"
    else:
        block = step.calls[segment.call].block
        place = f"the {segment.kind} of {step.names[block]!r} ({step.class_names[block]})"
    terms[place] = max(0, prediction.peak - segment.start)
    return dict(sorted(terms.items(), key=lambda item: -item[1]))


def plan_within(
    budget: int, step: Measurement, actions: Actions, place: Place | None = None
) -> Plan:
    """The plan of these actions, with a note on what it is predicted to cost.

    Args:
        budget: bytes.
        step: what was measured.
        actions: one for each block.
        place: where what is offloaded waits.
    """
    predicted = predict(step, actions)
    if not step.calls:
        note = (
            "no block was computed again in the measured step, so nothing is known of them and "
            "each is recomputed (under torch.compile that is not seen; use every_n= or plan=)"
        )
    elif not predicted.recompute_seconds:
        note = (
            f"plain training peaks at {format_bytes(predicted.peak)}, within the budget of "
            f"{format_bytes(budget)}: nothing is checkpointed"
        )
    else:
        plain = step.seconds - predict(step, ["recompute"] * len(step.names)).recompute_seconds
        note = (
            f"predicted to peak at {format_bytes(predicted.peak)} of the budget's "
            f"{format_bytes(budget)}, and a step to take {predicted.seconds / plain:.2f} times as "
            "long as plain training's"
        )
    return replace(plan_of(step, actions, place), notes=(note,))


def plan_of(step: Measurement, actions: Actions, place: Place | None = None) -> Plan:
    """The same without a note."""
    blocks = zip(step.names, step.class_names, actions, strict=True)
    return Plan(tuple(block_plan(*block, place) for block in blocks))


def agreed(
    steps: Sequence[Measurement], budgets: Sequence[int], allowed: Actions
) -> tuple[Measurement, list[Choice]]:
    """One choice for ranks that measured different things: what fits all of them.

    Args:
        steps: of each rank.
        budgets: of each rank, bytes; the smallest counts.
        allowed: actions to choose from.

    Returns:
        The step that the choice was made for, and an action for each block.

    Raises:
        BudgetTooSmall: there is no such plan; on every rank.
    """
    budget = min(budgets)
    step = merged(steps)
    if step is not None:
        return step, fastest(step, budget, allowed)
    largest = max(steps, key=lambda each: predict(each, ["recompute"] * len(each.names)).peak)
    own = [fastest(each, budget, allowed) for each in steps]
    chosen: list[Choice] = [
        same[0] if len(set(same)) == 1 else "recompute" for same in zip(*own, strict=True)
    ]
    if any(predict(each, chosen).peak > budget for each in steps):
        chosen = ["recompute"] * len(chosen)
    return largest, chosen


def format_bytes(num_bytes: int, *, up: bool = False) -> str:
    """Bytes for people: `126.3 MiB`; rounded up if what they read must be enough."""
    unit, size = next(
        (u, s)
        for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
        if num_bytes >= s or s == 1
    )
    if size == 1:
        return f"{num_bytes} bytes"
    tenths = -(-num_bytes * 10 // size) if up else round(num_bytes * 10 / size)
    return f"{tenths / 10:.1f} {unit}"
