"""Plans of one measured step for any budget.

Note: [The forward asks last]
The search knows two numbers of what a block holds while later ones compute. But what waits
elsewhere leaves late where the model's code holds it for longer, so it is there in the forward of
later blocks, and not in their backward. Taken together that is the larger, and nothing is gained.
The peak hardly ever lies in the forward. So its segments ask for nothing at first, and those that
turn out to be over the budget do in another search. What that one finds need not be the fastest, so
for a few blocks changes of one or two of them are tried then.
"""

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from lightning_ckpt.core.budget.able import choices
from lightning_ckpt.core.budget.costs import (
    Actions,
    Kind,
    Measurement,
    Prediction,
    predict,
    predicted_peaks,
)
from lightning_ckpt.core.budget.needs import Needs, needs_of
from lightning_ckpt.core.budget.planner import search
from lightning_ckpt.core.plan import Choice, is_offloaded

_FEW = 12  # blocks of which any two may be changed together, in some tenths of a second


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
        found, over = self._searched(budget)
        if over is None:
            return found
        better = self._improved(found or over, lambda each: (max(each.peak, budget), each.seconds))
        return better if predict(self._step, better).peak <= budget else None

    def _searched(self, budget: int) -> tuple[list[Choice] | None, list[Choice] | None]:
        """What the search finds; and a faster plan that is over the budget in the forward alone."""
        without, over = self._forward, None
        while True:
            if without not in self._needs:
                self._needs[without] = needs_of(self._step, self._able, without)
            found = search(self._needs[without], budget)
            if found is None:
                return None, over
            peaks = predicted_peaks(self._step, found)
            too_high = {index for index, peak in enumerate(peaks) if peak > budget}
            if not too_high:
                return found, over
            over = over or found
            if without.isdisjoint(too_high):
                return None, over
            without -= too_high

    def _improved(self, plan: list[Choice], cost: Callable[[Prediction], Any]) -> list[Choice]:
        """The plan after changes of one or two blocks, as long as one makes it better."""
        if len(plan) > _FEW:
            return plan
        ones = [((b, choice),) for b, able in enumerate(self._able) for choice in able]
        twos = [(*one, *two) for one, two in combinations(ones, 2)]
        least, is_better = cost(predict(self._step, plan)), True
        while is_better:
            is_better = False
            for changes in (*ones, *twos):
                changed = [dict(changes).get(block, choice) for block, choice in enumerate(plan)]
                if changed != plan and (now := cost(predict(self._step, changed))) < least:
                    plan, least, is_better = changed, now, True
        return plan

    def least(self) -> list[Choice]:
        """The plan with the smallest peak that is found."""
        best: list[Choice] = ["recompute"] * len(self._step.names)
        low, high, is_sure = 0, predict(self._step, best).peak, True
        while high - low > 1:
            middle = (low + high) // 2
            found, over = self._searched(middle)
            is_sure &= over is None
            if found is None:
                low = middle
            else:
                best, high = found, predict(self._step, found).peak
        if is_sure:
            return best
        return self._improved(best, lambda each: (each.peak, each.seconds))


def _forward_segments(step: Measurement) -> Iterator[int]:
    """From the first forward to the first recompute, in each wave."""
    last: Kind = "outside"
    for index, segment in enumerate(step.segments):
        last = last if segment.kind == "outside" else segment.kind
        if last == "forward":
            yield index
