"""What each block of a measured step may be given to do."""

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
