"""What each block of a measured step may be given to do."""

from collections.abc import Sequence

from lightning_ckpt.core.budget.costs import Actions, Measurement
from lightning_ckpt.core.plan import Choice


def choices(step: Measurement, allowed: Actions) -> list[list[Choice]]:
    """For each block, the choices that all its calls can take. What was not called is recomputed,
    since nothing is known of it, and so is what backward did not come to: that costs nothing."""
    reached = {segment.call for segment in step.segments if segment.kind == "recompute"}
    able: list[set[Choice] | None] = [None] * len(step.names)
    for index, call in enumerate(step.calls):
        here = set(call.options) if index in reached else set()
        before = able[call.block]
        able[call.block] = here if before is None else here & before
    return [
        ["recompute", *(a for a in allowed if a != "recompute" and seen and a in seen)]
        for seen in able
    ]


def with_outputs_held(step: Measurement, able: Sequence[Sequence[Choice]]) -> Measurement:
    """The same, as if each block held the results that some choice of it holds, so that they stay
    where they are when the next block offloads its inputs."""
    calls = []
    for call in step.calls:
        outputs = (step.calls[index] for index in call.producers)
        doubled = sum(max(c.options[a].output for a in able[c.block]) for c in outputs)
        options = {
            choice: option._replace(
                inputs=option.inputs - doubled,
                twice=option.twice + doubled,
            )
            if option.moved
            else option
            for choice, option in call.options.items()
        }
        calls.append(call._replace(options=options))
    return step._replace(calls=tuple(calls))


def without_outputs_held(step: Measurement, able: Sequence[Sequence[Choice]]) -> list[list[Choice]]:
    """The choices with which no block holds a result that the next one may offload."""
    apart = [list(each) for each in able]
    for call in step.calls:
        for producer in (step.calls[index] for index in call.producers):
            held = [a for a in apart[producer.block] if producer.options[a].output]
            if any(call.options[choice].moved for choice in able[call.block]):
                apart[producer.block] = [a for a in apart[producer.block] if a not in held]
    return apart
