"""The fastest plan within a budget for each batch, by its size.

A batch is measured, with every block recomputed, where its plan cannot be known: it is larger in a
side than all before, or the sizes measured so far do not tell its step (`fitted`). Batches that
break a record get rare, about as the logarithm of their number, and a fit needs as many sizes as it
has terms, so few are measured.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from lightning_ckpt.core.budget import agreed, plan_of, plan_within
from lightning_ckpt.core.budget.costs import Measurement, predict
from lightning_ckpt.core.budget.fitted import canonical, fitted
from lightning_ckpt.core.budget.measure import UNNAMED
from lightning_ckpt.core.budget.merging import are_alike, joined, with_more
from lightning_ckpt.core.budget.sizes import Size
from lightning_ckpt.core.budget.weighing import choices_with
from lightning_ckpt.core.budget.words import BudgetTooSmall
from lightning_ckpt.core.offload.config import OffloadConfig
from lightning_ckpt.core.plan import Choice, Plan

_MOST_SIZES = 48  # measured, of one structure; then a larger one's plan must do
_MOST_PLANS = 4096
_BUCKETS = 32  # in the longest side: sizes that differ by less than one may share a plan
_REACH = 1.125  # a side may be this much longer than all that were measured, if the fit is exact
_STEP_DOWN = 0.9  # of the budget, when memory runs out all the same
_NEAR = 1.5  # sides of a measured size that stands for a smaller one, where no fit is possible


class Planned(NamedTuple):
    """A plan for batches of one size and below.

    Attributes:
        size: the size.
        plan: the plan.
        is_free: it computes nothing again.
    """

    size: Size
    plan: Plan
    is_free: bool


class _Row(NamedTuple):
    """A measured size.

    Attributes:
        size: the size.
        steps: what was measured; several where blocks came in another order each time.
        is_settled: it was not the first step of all, which makes buffers and workspaces.
    """

    size: Size
    steps: tuple[Measurement, ...]
    is_settled: bool


class PlansBySize:
    """Plans for batches, learned from those that were measured.

    Args:
        budget: bytes that the peak of a step may take.
        notes: sentences for the user that each plan carries.
        offload: what a plan may offload; None: nothing.
    """

    def __init__(
        self, budget: int, notes: Sequence[str] = (), offload: OffloadConfig | None = None
    ) -> None:
        self.budget = budget
        self._allowed = choices_with(offload)
        self._place = None if offload is None else offload.target
        self._notes = tuple(notes)
        self._rows: dict[tuple[int, ...], dict[Size, _Row]] = {}
        self._plans: dict[Size, Plan] = {}
        self._planned: dict[tuple[int, ...], list[Planned]] = {}
        self._measured: dict[Size, Planned] = {}
        self._together: dict[tuple[Size, ...], Planned] = {}
        self._tail = 0  # the most that the end of a step took, with the optimizer in it
        self.num_planned = 0  # how often a plan was searched for
        self._is_lowered = False

    def add(self, found: Sequence[tuple[Size, Measurement]], *, is_settled: bool) -> None:
        """Learn from steps in which every block was recomputed.

        Args:
            found: sizes and what was measured.
            is_settled: whether there were steps before.

        Raises:
            BudgetTooSmall: no plan fits one of these batches.
        """
        self._forget_plans()
        # Of a step's micro-batches DDP touches its buckets in the last alone.
        unnamed = 0 if is_settled else max(step.terms.get(UNNAMED, 0) for _, step in found)
        for size, measured in found:
            step = with_more(canonical(measured), UNNAMED, unnamed)
            self._learn(size, step, is_settled)
            if step.segments[-1].kind == "outside":
                self._tail = max(self._tail, step.segments[-1].peak)
        # An error is to name the batch that does not fit, not a smaller one beside it.
        for size, _ in sorted(found, key=lambda each: -each[0].num_elements):
            if (row := self._rows[size.structure].get(size)) is not None:
                self._of(row)

    def _learn(self, size: Size, step: Measurement, is_settled: bool) -> None:
        rows = self._rows.setdefault(size.structure, {})
        # A training step that returns None tells nothing of others.
        empty = [row.size for row in rows.values() if not row.steps[0].calls]
        if not step.calls and len(empty) < len(rows):
            return
        for each in empty if step.calls else ():
            del rows[each]
        known = rows.get(size)
        before = known.steps if known and known.is_settled == is_settled else ()
        rows[size] = _Row(size, joined(before, step), is_settled)

    def _forget_plans(self) -> None:
        self._plans.clear()
        self._planned.clear()
        self._measured.clear()
        self._together.clear()

    def lower(self, size: Size, plan: Plan) -> Plan | None:
        """Lower the budget, for all batches from now on, until another plan follows from it.

        Where no plan is within the lowered budget every block is recomputed, without an error.

        Args:
            size: of a batch that ran out of memory.
            plan: under which it did.

        Returns:
            Its plan within the new budget; None: it is not known.
        """
        self._is_lowered = True
        while True:
            self.budget = int(_STEP_DOWN * self.budget)
            self._forget_plans()
            found = self.choose(size)
            if found is None or found.blocks != plan.blocks:
                return found
            if all(block.action == "recompute" for block in plan):
                return None

    def choose(self, size: Size) -> Plan | None:
        """The plan for a batch of this size; None: measure it."""
        plan = self._plans.get(size)
        if plan is None:
            planned = self._find(size)
            if planned is None:
                return None
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            plan = self._plans[size] = planned.plan
        return plan

    def choose_for_all(self, sizes: Sequence[Size]) -> Plan | None:
        """One plan for ranks whose batches are of these sizes, where none is known for a batch
        that is as large as all of them; None: measure them."""
        own = tuple(sorted(set(sizes)))
        if own not in self._together:
            found = [self._steps_of(size) for size in own]
            if None in found:
                return None
            self._together[own] = self._shared(own, [step for each in found for step in each or ()])
        return self._together[own].plan

    def _steps_of(self, size: Size) -> Sequence[Measurement] | None:
        """What is known of it, or must do since no more sizes are measured; None: too little."""
        rows = self._rows.get(size.structure, {})
        own = rows.get(size)
        if own is not None and own.is_settled:
            return own.steps
        if (step := self._fit(size, rows, 1.0)) is not None:
            return (step,)
        return None if len(rows) < _MOST_SIZES else [row.steps[0] for row in rows.values()]

    def _shared(self, sizes: Sequence[Size], steps: Sequence[Measurement]) -> Planned:
        largest = max(sizes, key=lambda size: size.num_elements)
        try:
            return self._within(largest, steps)
        except BudgetTooSmall:  # each fits by itself, but what is as large as all of them does not
            return self._recomputed(largest, steps[0])

    def largest(self) -> Planned:
        """The plan for the largest batch that was measured."""
        rows = [row for rows in self._rows.values() for row in rows.values()]
        largest = max(rows, key=lambda row: row.size.num_elements)
        return self._of(largest)

    def _find(self, size: Size) -> Planned | None:
        rows = self._rows.get(size.structure, {})
        own = rows.get(size)
        if own is not None and own.is_settled:
            return self._of(own)
        if not rows:
            return None
        if _is_record(size, rows):
            found = self._near(size, rows, _REACH) or self._fitted(size, rows, _REACH)
            return found or (self._above(size, rows) if len(rows) >= _MOST_SIZES else None)
        if found := self._near(size, rows) or self._fitted(size, rows):
            return found
        if own is not None:
            return self._of(own)
        return self._above(size, rows)

    def _above(self, size: Size, rows: dict[Size, _Row]) -> Planned | None:
        """The plan of a measured size that is as large in every side, where that is good enough."""
        larger = [r for r in rows.values() if r.is_settled and _is_within(size, r.size)]
        is_full = len(rows) >= _MOST_SIZES
        if not larger:
            step = next(iter(rows.values())).steps[0]
            return self._recomputed(size, step) if is_full else None
        above = min(larger, key=lambda row: row.size.num_elements)
        planned = self._of(above)
        is_enough = planned.is_free or is_full or self._stands_for(above, size, rows)
        return planned if is_enough else None

    def _recomputed(self, size: Size, step: Measurement) -> Planned:
        choice: Choice = "recompute"
        if "recompute_offloaded" in self._allowed:
            choice = "recompute_offloaded"
        plan = plan_of(step, [choice] * len(step.names), self._place)
        return Planned(size, replace(plan, notes=self._notes), is_free=False)

    def _near(self, size: Size, rows: dict[Size, _Row], reach: float = 1.0) -> Planned | None:
        """What was planned for a size that is larger by less than a bucket, or by more where that
        plan computes nothing again."""
        top = _top(size, rows, reach)
        near = (
            planned
            for planned in self._planned.get(size.structure, ())
            if _is_within(size, planned.size) and (planned.is_free or _is_within(planned.size, top))
        )
        return next(near, None)

    def _fitted(self, size: Size, rows: dict[Size, _Row], reach: float = 1.0) -> Planned | None:
        """A plan for the top of the size's bucket, or else for the size itself."""
        for wanted in dict.fromkeys((_top(size, rows, reach), size)):
            step = self._fit(wanted, rows, reach)
            if step is None:
                continue
            try:
                planned = self._within(wanted, (step,))
            except BudgetTooSmall:  # by its margins: the plan of a larger one, or measure
                continue
            self._planned.setdefault(size.structure, []).append(planned)
            return planned
        return None

    def _fit(self, size: Size, rows: dict[Size, _Row], reach: float) -> Measurement | None:
        settled = [row for row in rows.values() if row.is_settled]
        if any(len(row.steps) > 1 for row in settled):
            return None
        sizes, steps = [row.size for row in settled], [row.steps[0] for row in settled]
        return fitted(sizes, steps, size, reach=reach)

    def _stands_for(self, above: _Row, size: Size, rows: dict[Size, _Row]) -> bool:
        """Whether a measured size may stand for a smaller one: where no fit will come."""
        steps = [step for row in rows.values() for step in row.steps]
        is_near = all(a <= _NEAR * b for a, b in zip(above.size.dims, size.dims, strict=True))
        return is_near and not are_alike(steps)

    def _of(self, row: _Row) -> Planned:
        """The plan for a measured size."""
        if row.size not in self._measured:
            self._measured[row.size] = self._within(row.size, row.steps)
        return self._measured[row.size]

    def _within(self, size: Size, steps: Sequence[Measurement]) -> Planned:
        self.num_planned += 1
        steps = [self._with_tail(step) for step in steps]
        try:
            step, actions = agreed(steps, [self.budget], self._allowed)
        except BudgetTooSmall as error:
            if self._is_lowered:
                return self._recomputed(size, steps[0])
            raise error.about(str(size)) from None
        plan = plan_within(self.budget, step, actions, self._place)
        is_free = not predict(step, actions).recompute_seconds
        return Planned(size, replace(plan, notes=(*self._notes, *plan.notes)), is_free)

    def _with_tail(self, step: Measurement) -> Measurement:
        """The optimizer does not step in each micro-batch, and what it takes goes by no size."""
        *segments, last = step.segments
        if last.kind == "outside":
            last = last._replace(peak=max(last.peak, self._tail))
        return step._replace(segments=(*segments, last))


def _is_within(size: Size, other: Size) -> bool:
    return all(a <= b for a, b in zip(size.dims, other.dims, strict=True))


def _is_record(size: Size, rows: dict[Size, _Row]) -> bool:
    """Whether a side is longer than all that were measured."""
    return any(
        side > max(sides) for side, *sides in zip(size.dims, *(s.dims for s in rows), strict=True)
    )


def _top(size: Size, rows: dict[Size, _Row], reach: float) -> Size:
    """The largest size that may have the same plan: each side that varies longer by a bucket."""
    sides = [
        side
        if min(known) == max(known)
        else max(side, min(side + max(known) // _BUCKETS, int(reach * max(known))))
        for side, *known in zip(size.dims, *(other.dims for other in rows), strict=True)
    ]
    return size._replace(dims=tuple(sides))
