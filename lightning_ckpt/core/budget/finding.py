"""Plans of one measured step for any budget.

Note: [The forward asks last]
The search knows two numbers of what a block holds while later ones compute. But what waits
elsewhere leaves late where the model's code holds it for longer, so it is there in the forward of
later blocks, and not in their backward. Taken together that is the larger, and nothing is gained.
The peak hardly ever lies in the forward. So its segments ask for nothing in the search, which gives
the faster plans first, and the first of them that is within the budget in the forward, too, is the
fastest of all. Only if many are not, the segments in which they are over it ask for something.
"""

from collections.abc import Iterator, Set

from lightning_ckpt.core.budget.able import choices
from lightning_ckpt.core.budget.costs import (
    Actions,
    Kind,
    Measurement,
    predict,
    predicted_peaks,
)
from lightning_ckpt.core.budget.needs import Needs, needs_of
from lightning_ckpt.core.budget.planner import search
from lightning_ckpt.core.plan import Choice, is_offloaded

# For so many blocks it takes some tenths of a second to try so many plans for a budget, or few for
# each of many budgets, or to change each block. It takes as long for fewer plans of more blocks.
_NUM_BLOCKS = 12
_MANY, _FEW = 2000, 200


class Finder:
    """Finds them.

    Args:
        step: what was measured.
        allowed: what to choose from; "recompute" always is there.
    """

    def __init__(self, step: Measurement, allowed: Actions) -> None:
        self._step = step
        self._able = choices(step, allowed)
        offloads = any(is_offloaded(choice) for able in self._able for choice in able)
        self._forward = frozenset(_forward_segments(step) if offloads else ())
        self._needs: dict[frozenset[int], Needs] = {}  # by the segments that ask for nothing

    def within(self, budget: int) -> list[Choice] | None:
        """The fastest plan that is found within a budget, in bytes; None: none is.
        Note: [The forward asks last]."""
        return self._searched(budget, _MANY)[0]

    def _searched(self, budget: int, most: int) -> tuple[list[Choice] | None, bool]:
        """The same, and whether that is sure after so many plans at most."""
        most = int(most * min(1.0, _NUM_BLOCKS / max(1, len(self._able))) ** 2)
        too_high: frozenset[int] = frozenset()
        for number, plan in enumerate(search(self._needs_without(self._forward), budget)):
            too_high = self._too_high(plan, budget)
            if not too_high:
                return plan, True
            if number >= most:
                return self._searched_with(too_high, budget), False
        return None, True

    def _searched_with(self, too_high: Set[int], budget: int) -> list[Choice] | None:
        """What is found if these segments of the forward ask for something, too."""
        asking: Set[int] = frozenset()
        while not too_high <= asking:
            asking |= too_high
            found = next(search(self._needs_without(self._forward - asking), budget), None)
            if found is None:
                return None
            too_high = self._too_high(found, budget)
            if not too_high:
                return found
        return None

    def _needs_without(self, segments: frozenset[int]) -> Needs:
        """What is asked for if these segments ask for nothing."""
        if segments not in self._needs:
            self._needs[segments] = needs_of(self._step, self._able, segments)
        return self._needs[segments]

    def _too_high(self, plan: list[Choice], budget: int) -> frozenset[int]:
        """Segments in which the plan is over the budget."""
        peaks = enumerate(predicted_peaks(self._step, plan))
        return frozenset(index for index, peak in peaks if peak > budget)

    def least(self) -> list[Choice]:
        """The plan with the smallest peak that is found."""
        best: list[Choice] = ["recompute"] * len(self._step.names)
        low, high, is_sure = 0, predict(self._step, best).peak, True
        while high - low > 1:
            middle = (low + high) // 2
            found, is_known = self._searched(middle, _FEW)
            is_sure &= is_known
            if found is None:
                low = middle
            else:
                best, high = found, predict(self._step, found).peak
        return best if is_sure else self._lowered(best)

    def _lowered(self, plan: list[Choice]) -> list[Choice]:
        """The plan after changes of one block, as long as one lowers its peak."""
        if len(plan) > _NUM_BLOCKS:
            return plan
        least, is_lower = predict(self._step, plan)[:2], True
        while is_lower:
            is_lower = False
            for block, able in enumerate(self._able):
                for choice in able:
                    changed = [*plan[:block], choice, *plan[block + 1 :]]
                    if (now := predict(self._step, changed)[:2]) < least:
                        plan, least, is_lower = changed, now, True
        return plan


def _forward_segments(step: Measurement) -> Iterator[int]:
    """From the first forward to the first recompute, in each wave."""
    last: Kind = "outside"
    for index, segment in enumerate(step.segments):
        last = last if segment.kind == "outside" else segment.kind
        if last == "forward":
            yield index
