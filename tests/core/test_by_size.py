"""Plans for batches of different sizes, learned from a few that were measured."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from test_budget import ACTIONS, chain
from test_fitted import attention, size, sized

from lightning_ckpt.core.budget import by_size, fastest
from lightning_ckpt.core.budget.by_size import PlansBySize
from lightning_ckpt.core.budget.costs import Measurement, Segment, predict
from lightning_ckpt.core.budget.fitted import canonical
from lightning_ckpt.core.budget.measure import UNNAMED
from lightning_ckpt.core.budget.sizes import Size
from lightning_ckpt.core.budget.words import BudgetTooSmall
from lightning_ckpt.core.plan import Plan

Truth = Callable[[Size], Measurement]


def of_rows_and_length(own: Size) -> Measurement:
    return attention(*own.dims)


def peak_of(plan: Plan, step: Measurement) -> int:
    return predict(step, [block.action for block in plan]).peak


def seconds_of(plan: Plan, step: Measurement) -> float:
    return predict(step, [block.action for block in plan]).recompute_seconds


class Run:
    """A training whose steps cost what `truth` says; which were measured, and how each went."""

    def __init__(self, truth: Truth, budget: int) -> None:
        self.truth = truth
        self.plans = PlansBySize(budget)
        self.measured: list[Size] = []
        self.is_measured: list[bool] = []
        self.peaks: list[int] = []
        self.lost: list[float] = []  # seconds of recomputes, against all recomputed

    def step(self, own: Size) -> None:
        step = self.truth(own)
        plan = self.plans.choose(own) if self.measured else None
        everything = predict(step, ["recompute"] * len(step.names))
        self.is_measured.append(plan is None)
        if plan is None:
            self.plans.add([(own, step)], is_settled=bool(self.measured))
            self.measured.append(own)
            self.peaks.append(everything.peak)
            self.lost.append(1.0)
        else:
            self.peaks.append(peak_of(plan, step))
            self.lost.append(seconds_of(plan, step) / everything.recompute_seconds)


def lognormal(num: int, seed: int, longest: int = 512) -> list[int]:
    """Median an eighth of the longest, sigma 0.5: the lengths of real texts."""
    rng = random.Random(seed)
    return [
        max(1, min(longest, round(rng.lognormvariate(0, 0.5) * longest / 8))) for _ in range(num)
    ]


def middle(truth: Truth, largest: Size, share: float = 0.3) -> int:
    low, high = (predict(truth(largest), [a] * 4).peak for a in ("recompute", "keep"))
    return int(low + share * (high - low))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("share", [0.01, 0.3, 0.9])
def test_the_budget_is_held_and_few_are_measured(share: float, seed: int) -> None:
    lengths = lognormal(1000, seed)
    run = Run(of_rows_and_length, middle(of_rows_and_length, size(4, max(lengths)), share))
    for length in lengths:
        run.step(size(4, length))
    assert max(run.peaks) <= run.plans.budget
    assert len(run.measured) <= 15
    assert sum(run.is_measured[100:]) <= 6, "records get rare"
    assert run.plans.num_planned <= 120, "a plan serves a bucket of sizes"


@pytest.mark.parametrize("seed", range(3))
def test_short_batches_are_kept_and_long_ones_are_not(seed: int) -> None:
    lengths = lognormal(600, seed)
    largest = size(4, max(lengths))
    run = Run(of_rows_and_length, middle(of_rows_and_length, largest, 0.01))
    for length in lengths:
        run.step(size(4, length))
    later = [
        (length, lost)
        for length, lost, is_measured in zip(lengths, run.lost, run.is_measured, strict=True)
        if not is_measured
    ]
    short = [lost for length, lost in later if length < max(lengths) / 4]
    assert short
    assert max(short) == 0
    long = [lost for length, lost in later if length > 0.9 * max(lengths)]
    assert all(lost > 0 for lost in long)


def test_plans_are_as_good_as_those_that_know_the_truth() -> None:
    """But for the bucket."""
    lengths = lognormal(600, 5)
    budget = middle(of_rows_and_length, size(4, max(lengths)))
    run = Run(of_rows_and_length, budget)
    ours = best = 0.0
    for length in lengths:
        run.step(size(4, length))
        if not run.is_measured[-1]:
            step = of_rows_and_length(size(4, length))
            ours += run.lost[-1] * predict(step, ["recompute"] * 4).recompute_seconds
            best += predict(step, fastest(step, budget, ACTIONS)).recompute_seconds
    assert best <= ours <= 1.15 * best


@pytest.mark.parametrize("seed", range(3))
def test_rows_and_lengths(seed: int) -> None:
    """As many tokens in each batch as fit."""
    rng = random.Random(seed)
    sizes = [size(max(1, 2048 // length), length) for length in lognormal(1000, seed)]
    rng.shuffle(sizes)
    worst = max(sizes, key=lambda s: predict(of_rows_and_length(s), ["keep"] * 4).peak)
    run = Run(of_rows_and_length, middle(of_rows_and_length, worst))
    for own in sizes:
        run.step(own)
    assert max(run.peaks) <= run.plans.budget
    assert len(run.measured) <= 40
    assert sum(run.is_measured[200:]) <= 10


def across(own: Size) -> Measurement:
    """Source and target."""
    rows, source, _, target = own.dims

    def bytes_of(seed: int) -> int:
        a, b, c = seed % 7, seed % 11, seed % 13
        return 1000 * seed + rows * (a * source**2 + b * source * target + c * target)

    return sized(canonical(chain(4, random.Random(0))), bytes_of, rows * (source + target) / 50)


def test_two_lengths() -> None:
    pairs = list(zip(lognormal(800, 1, 128), lognormal(800, 2, 128), strict=True))
    sizes = [Size(0, (2, 2), (4, source, 4, target)) for source, target in pairs]
    worst = max(sizes, key=lambda s: predict(across(s), ["keep"] * 4).peak)
    run = Run(across, middle(across, worst))
    for own in sizes:
        run.step(own)
    assert max(run.peaks) <= run.plans.budget
    assert len(run.measured) <= 40


def test_a_steady_size_is_measured_once_and_planned_once() -> None:
    run = Run(of_rows_and_length, middle(of_rows_and_length, size(4, 100)))
    for _ in range(50):
        run.step(size(4, 100))
    assert run.is_measured == [True] + [False] * 49
    assert run.plans.num_planned == 1
    assert run.plans.choose(size(4, 100)) is run.plans.choose(size(4, 100))
    taken = []
    for _ in range(10):
        begin = time.process_time()
        for _ in range(100):
            run.plans.choose(size(4, 100))
        taken.append((time.process_time() - begin) / 100)
    assert min(taken) < 20e-6


def test_a_smaller_batch_is_not_measured_where_nothing_could_be_won() -> None:
    """The plan of a larger one keeps all: it does for each smaller one. (That of the first step is
    not trusted so far.)"""
    run = Run(of_rows_and_length, 10**12)
    for length in [10, 100, 3, 50, 99, 10, 100]:
        run.step(size(4, length))
    assert run.measured == [size(4, 10), size(4, 100)]
    run.step(size(4, 101))
    assert len(run.measured) == 3


def test_what_the_first_step_took_counts_no_more_once_others_are_known() -> None:
    """It makes buffers, workspaces, and the buckets of DDP, which all later steps find there."""

    def later(own: Size) -> Measurement:
        return sized(attention(*own.dims), lambda n: n + 10**6, 1.0)

    budget = middle(later, size(4, 100))
    run = Run(later, budget)
    run.plans.add([(size(4, 60), attention(4, 60))], is_settled=False)
    run.measured.append(size(4, 60))
    for length in [100, 20, 40, 80]:
        run.step(size(4, length))
    plan = run.plans.choose(size(4, 60))
    assert plan is not None
    assert peak_of(plan, later(size(4, 60))) <= budget
    run.plans.add([(size(4, 60), later(size(4, 60)))], is_settled=True)
    rows = run.plans._rows[size(4, 60).structure]
    assert rows[size(4, 60)].steps[0].segments[0] == later(size(4, 60)).segments[0]


@pytest.mark.parametrize("is_first_large", [True, False])
def test_the_same_size_again_counts_with_its_largest_bytes(is_first_large: bool) -> None:
    """Experts, or anything that goes by the values."""
    small, large = attention(4, 10), sized(attention(4, 10), lambda n: n * 1000, 1.0)
    low, high = (predict(large, [action] * 4).peak for action in ("recompute", "keep"))
    plans = PlansBySize((low + high) // 2)
    for step in [large, small] if is_first_large else [small, large]:
        plans.add([(size(4, 10), step)], is_settled=True)
    plan = plans.choose(size(4, 10))
    assert plan is not None
    assert peak_of(plan, large) <= plans.budget
    assert plan.num_recomputed


def test_the_optimizer_counts_in_each_micro_batch() -> None:
    """It steps after the last of them alone."""
    stepping = attention(4, 10)
    *segments, last = stepping.segments
    plain = predict(stepping, ["keep"] * 4).peak
    stepping = stepping._replace(segments=(*segments, last._replace(peak=10 * plain)))
    plans = PlansBySize(20 * plain)
    plans.add([(size(4, 10), stepping), (size(4, 9), attention(4, 9))], is_settled=True)
    plan = plans.choose(size(4, 9))
    assert plan is not None
    assert plans._with_tail(attention(4, 9)).segments[-1].peak == 10 * plain


class Skipping:
    """Blocks are left out at random, so no two steps can be compared (layer drop)."""

    def __init__(self) -> None:
        self.rng = random.Random(0)

    def __call__(self, own: Size) -> Measurement:
        step = attention(*own.dims)
        gone = self.rng.choice([None, 1, 2])
        return step._replace(
            segments=tuple(s for s in step.segments if s.call is None or s.call != gone)
        )


def test_steps_that_cannot_be_compared() -> None:
    """A measured size stands for those a little smaller, so that not every batch is measured."""
    lengths = [random.Random(1).randint(20, 100) for _ in range(1)] + lognormal(400, 3, 300)
    truth = Skipping()
    run = Run(truth, middle(of_rows_and_length, size(4, 300), 0.5))
    for length in lengths:
        run.step(size(4, length))
    assert len(run.measured) <= 40
    assert sum(run.is_measured[200:]) <= 8
    assert max(run.peaks) <= run.plans.budget


def test_what_is_known_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_size, "_MOST_SIZES", 6)
    monkeypatch.setattr(by_size, "_MOST_PLANS", 10)
    truth = Skipping()
    run = Run(truth, middle(of_rows_and_length, size(40, 300), 0.01))
    rng = random.Random(0)
    run.step(size(40, 10))
    run.step(size(10, 300))
    for _ in range(200):
        run.step(size(rng.randint(1, 40), rng.randint(1, 300)))
        assert len(run.plans._plans) <= 10
    assert len(run.measured) <= 7
    assert max(run.peaks) <= run.plans.budget


def test_records_without_end_are_not_measured_without_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where no fit is possible each longer batch is a record: then every block is recomputed."""
    monkeypatch.setattr(by_size, "_MOST_SIZES", 6)
    run = Run(Skipping(), middle(of_rows_and_length, size(4, 4000), 0.01))
    for length in range(40, 2040, 50):
        run.step(size(4, length))
    assert len(run.measured) == 6
    assert run.lost[-1] == 1


def test_too_small_a_budget_names_the_batch() -> None:
    step = attention(4, 100)
    plans = PlansBySize(predict(attention(4, 50), ["recompute"] * 4).peak + 1)
    plans.add([(size(4, 50), attention(4, 50))], is_settled=False)
    with pytest.raises(BudgetTooSmall, match=r"for a batch with tensors of \(4, 100\): give") as e:
        plans.add([(size(4, 100), step)], is_settled=True)
    plans = PlansBySize(e.value.least)
    plans.add([(size(4, 100), step)], is_settled=True)


def test_margins_alone_make_no_error() -> None:
    """What is fitted with a margin above the budget gets the plan of a larger batch."""
    rng = random.Random(0)
    noise = lambda: rng.uniform(0.9, 1.1)  # noqa: E731
    steps = {length: attention(4, length, noise) for length in [10, 20, 35, 50, 65, 80, 95, 100]}
    budget = max(predict(step, ["recompute"] * 4).peak for step in steps.values()) + 10
    plans = PlansBySize(budget)
    plans.add([(size(4, n), step) for n, step in steps.items()], is_settled=True)
    for length in range(10, 100):
        plans.choose(size(4, length))


def test_the_plan_of_the_largest() -> None:
    run = Run(of_rows_and_length, middle(of_rows_and_length, size(4, 100)))
    for length in [40, 100, 70, 20]:
        run.step(size(4, length))
    assert run.plans.largest().size == size(4, 100)
    assert run.plans.largest().plan == run.plans.choose(size(4, 100))


def test_notes_are_in_each_plan() -> None:
    plans = PlansBySize(10**9, ["a note"])
    plans.add([(size(4, 10), attention(4, 10))], is_settled=False)
    plan = plans.choose(size(4, 10))
    assert plan is not None
    assert plan.notes[0] == "a note"
    assert len(plan.notes) == 2


def test_sizes_of_another_structure_are_learned_apart() -> None:
    plans = PlansBySize(10**9)
    plans.add([(size(4, 10), attention(4, 10))], is_settled=True)
    assert plans.choose(Size(1, (2,), (4, 10))) is None
    assert plans.choose(Size(0, (1, 1), (4, 10))) is None


def test_a_lowered_budget_gives_another_plan_until_all_is_recomputed() -> None:
    own = size(4, 64)
    run = Run(of_rows_and_length, middle(of_rows_and_length, own, 0.9))
    for _ in range(3):
        run.step(own)
    seen = [run.plans.choose(own)]
    while seen[-1] is not None and seen[-1].num_recomputed < len(seen[-1]):
        before = run.plans.budget
        seen.append(run.plans.lower(own, seen[-1]))
        assert run.plans.budget < 0.91 * before
        assert run.plans.choose(own) == seen[-1], "it stays"
    assert len(seen) > 1
    assert seen[-1] is not None
    assert {block.action for block in seen[-1]} == {"recompute"}
    assert run.plans.lower(own, seen[-1]) is None


def test_below_a_lowered_budget_a_larger_batch_is_recomputed_and_no_error() -> None:
    own, larger = size(4, 64), size(4, 640)
    run = Run(of_rows_and_length, middle(of_rows_and_length, own, 0.9))
    for _ in range(3):
        run.step(own)
    plan = run.plans.choose(own)
    assert plan is not None
    run.plans.lower(own, plan)
    run.plans.add([(larger, of_rows_and_length(larger))], is_settled=True)
    chosen = run.plans.choose(larger)
    assert chosen is not None
    assert chosen.num_recomputed == len(chosen)


@pytest.mark.parametrize("step", [1, 2, 5])
def test_lengths_that_grow_are_not_all_measured(step: int) -> None:
    lengths = range(4, 4 + 100 * step, step)
    run = Run(of_rows_and_length, middle(of_rows_and_length, size(4, lengths[-1])))
    for length in lengths:
        run.step(size(4, length))
    assert max(run.peaks) <= run.plans.budget
    assert sum(run.is_measured) <= 40
    assert sum(run.is_measured[50:]) <= 8, "those that are longer by an eighth"


def test_far_beyond_what_was_measured_is_measured() -> None:
    run = Run(of_rows_and_length, 10**12)
    for length in (10, 20, 30, 40, 50, 60, 67, 68):
        run.step(size(4, length))
    assert run.is_measured == [True] * 6 + [False, True]


def test_ranks_with_batches_that_no_rank_has_alone() -> None:
    """One plan for all, once each of their sizes was measured, and within the budget on each."""
    sizes = [size(4, 40), size(8, 20)]
    steps = [of_rows_and_length(own) for own in sizes]
    budget = int(1.4 * max(predict(step, ["recompute"] * 4).peak for step in steps))
    plans = PlansBySize(budget)
    plans.add([(sizes[0], steps[0])], is_settled=True)
    assert plans.choose_for_all(sizes) is None
    plans.add([(sizes[1], steps[1])], is_settled=True)
    assert plans.choose(size(8, 40)) is None
    plan = plans.choose_for_all(sizes)
    assert plan is not None
    assert any(block.action != "recompute" for block in plan)
    assert all(peak_of(plan, step) <= budget for step in steps)
    assert plans.choose_for_all(sizes[::-1]) is plan


def test_ranks_whose_batches_have_other_parts() -> None:
    own, other = size(4, 40), Size(0, (1, 1), (4, 40))
    plans = PlansBySize(10**12)
    plans.add([(own, attention(4, 40)), (other, attention(4, 40))], is_settled=False)
    assert plans.choose_for_all([own, other]) is None, "the first step counts only until then"
    plans.add([(own, attention(4, 40)), (other, attention(4, 40))], is_settled=True)
    plan = plans.choose_for_all([own, other])
    assert plan is not None
    assert plan.num_recomputed == 0


def test_ranks_of_many_sizes_are_not_measured_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_size, "_MOST_SIZES", 2)
    plans = PlansBySize(10**12)
    for length in (10, 20):
        plans.add([(size(4, length), attention(4, length))], is_settled=True)
    assert plans.choose_for_all([size(5, 10), Size(0, (1,), (4,))]) is None
    assert plans.choose_for_all([size(5, 10), size(4, 20)]) is not None


def test_what_fits_each_rank_but_not_as_one_is_recomputed() -> None:
    first, second = size(4, 40), size(8, 20)
    plans = PlansBySize(10**12)
    plans.add([(first, attention(4, 40)), (second, attention(8, 20))], is_settled=True)
    plans.budget = 1  # as if it fitted no more
    plan = plans.choose_for_all([first, second])
    assert plan is not None
    assert plan.num_recomputed == 4


def test_an_error_names_the_largest_batch() -> None:
    """The end of its step counts for smaller ones too, but it is no fault of theirs."""
    small, large = size(4, 10), size(4, 400)
    plans = PlansBySize(predict(attention(4, 10), ["recompute"] * 4).peak)
    with pytest.raises(BudgetTooSmall, match=r"\(4, 400\)"):
        plans.add([(small, attention(4, 10)), (large, attention(4, 400))], is_settled=False)


def test_buckets_that_only_the_last_micro_batch_touches_were_there_in_all() -> None:
    first, last = Size(0, (2,), (4, 40)), Size(1, (2,), (4, 40))
    step = attention(4, 40)
    budget = predict(step, ["keep"] * 4).peak
    for unnamed in (0, 1000):
        met = step._replace(terms={**step.terms, UNNAMED: unnamed})
        plans = PlansBySize(budget)
        plans.add([(first, step), (last, met)], is_settled=False)
        plan = plans.choose(first)
        assert plan is not None
        assert (plan.num_recomputed > 0) is (unnamed > 0)
        plans.add([(first, step), (last, met)], is_settled=True)
        plan = plans.choose(first)
        assert plan is not None
        assert plan.num_recomputed == 0, "what a later step met is known"


@pytest.mark.parametrize("first", [True, False])
def test_steps_in_which_no_block_ran_tell_nothing_of_others(first: bool) -> None:
    """As where `training_step` returns None now and then."""
    step = attention(4, 10)
    nothing = step._replace(calls=(), segments=step.segments[-1:])
    plans = PlansBySize(10**12)
    found = [(size(4, 10), step), (size(4, 12), nothing)]
    plans.add(found if first else found[::-1], is_settled=True)
    assert plans.choose(size(4, 12)) is None, "it is measured when it comes again"
    for length in (20, 30, 40, 50):
        plans.add([(size(4, length), attention(4, length))], is_settled=True)
    plan = plans.choose(size(4, 12))
    assert plan is not None
    assert plan.num_recomputed == 0


def test_batches_that_never_reach_a_block_are_not_measured_for_ever() -> None:
    nothing = attention(4, 10)._replace(calls=(), segments=(Segment("outside", None, 0, 9),))
    plans = PlansBySize(10**12)
    plans.add([(size(4, 10), nothing)], is_settled=True)
    assert plans.choose(size(4, 10)) is not None
