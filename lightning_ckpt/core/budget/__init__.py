"""The fastest plan whose peak is within a budget."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from lightning_ckpt.core.budget.costs import Actions, Measurement, Prediction, predict
from lightning_ckpt.core.budget.finding import Finder
from lightning_ckpt.core.budget.merging import merged
from lightning_ckpt.core.budget.words import BudgetTooSmall, format_bytes
from lightning_ckpt.core.plan import Choice, Place, Plan, block_plan, is_offloaded


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
    finder = Finder(step, allowed)
    if found := finder.within(budget):
        return found
    least = finder.least()
    if predict(step, least).peak > budget:
        raise _too_small(step, budget, least, allowed)
    return least


def least_peak(step: Measurement, allowed: Actions) -> list[Choice]:
    """The plan with the smallest peak of all."""
    return Finder(step, allowed).least()


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
    return replace(plan_of(step, actions, place), notes=(_note(budget, step, actions),))


def _note(budget: int, step: Measurement, actions: Actions) -> str:
    predicted = predict(step, actions)
    if not step.calls:
        return (
            "no block was computed again in the measured step (frozen blocks without a gradient "
            "are not; under torch.compile it is not seen), so nothing is known of them: each stays "
            "checkpointed; use every_n= or plan= to choose"
        )
    if all(actions[call.block] == "keep" for call in step.calls):
        return (
            f"plain training peaks at {format_bytes(predicted.peak)}, within the budget of "
            f"{format_bytes(budget)}: nothing is checkpointed"
        )
    peak = (
        f"predicted to peak at {format_bytes(predicted.peak)} of the budget's "
        f"{format_bytes(budget)}"
    )
    return peak + _words_for_time(step, predicted)


def _words_for_time(step: Measurement, predicted: Prediction) -> str:
    if not predicted.recompute_seconds:
        return ", with nothing computed again"
    again = predict(step, ["recompute"] * len(step.names)).recompute_seconds
    plain = step.seconds - again
    if plain < again:  # it has the blocks' forwards in it, so these times are none to go by
        return ""
    return f", and a step to take {predicted.seconds / plain:.2f} times as long as plain training's"


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
