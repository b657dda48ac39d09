"""From a plan that ran out of memory to one that needs less."""

from dataclasses import replace
from typing import Any, Literal, get_args

from lightning_ckpt.core.plan import Plan

OnOom = Literal["raise", "tighten"]


def read_on_oom(on_oom: Any) -> OnOom:
    """Return `on_oom` if it is a word that is known.

    Raises:
        ValueError: it is not.
    """
    words = get_args(OnOom)
    if on_oom not in words:
        raise ValueError(
            f"on_oom={on_oom!r} is not known; use 'raise', to let an out-of-memory error end the "
            "run, or 'tighten', to go on with a plan that needs less memory"
        )
    return words[words.index(on_oom)]


def tightened(plan: Plan, *, is_last: bool = False) -> Plan | None:
    """The same plan with more blocks computed again: half of those that are not yet, the earliest
    ones, since what an early block gives up is missing at the peak, which comes late.

    Args:
        plan: the one that ran out of memory.
        is_last: there is no other try: all blocks.

    Returns:
        A plan of the same blocks, None if each is recomputed as a whole already.
    """
    loose = [index for index, block in enumerate(plan) if block.action != "recompute"]
    if not loose:
        return None
    taken = set(loose if is_last else loose[: (len(loose) + 1) // 2])
    place = next((b.offload for b in plan if b.action != "keep" and b.offload), None)
    blocks = (
        replace(block, action="recompute", offload=block.offload or place)
        if index in taken
        else block
        for index, block in enumerate(plan)
    )
    return replace(plan, blocks=tuple(blocks), every_n=None)
