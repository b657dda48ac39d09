"""A budget's words, the search against every plan there is, and what is said when nothing fits."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from lightning_ckpt.core.budget import agreed, fastest, least_peak, plan_within
from lightning_ckpt.core.budget.costs import Call, Measurement, Option, Segment, predict
from lightning_ckpt.core.budget.merging import merged, pooled
from lightning_ckpt.core.budget.planner import _front
from lightning_ckpt.core.budget.words import (
    Budget,
    BudgetTooSmall,
    budget_bytes,
    format_bytes,
    read_budget,
)
from lightning_ckpt.core.plan import Action

ACTIONS: list[Action] = ["keep", "recompute", "recompute_saving"]


# --- words


@pytest.mark.parametrize(
    ("word", "read"),
    [
        ("14GiB", Budget("bytes", 14 * 2**30)),
        (" 1.5 gib", Budget("bytes", 3 * 2**29)),
        ("500 MB", Budget("bytes", 500_000_000)),
        ("7B", Budget("bytes", 7)),
        (123, Budget("bytes", 123)),
        (0.9, Budget("share", 0.9)),
        (1.0, Budget("share", 1.0)),
        ("auto", Budget("auto", 0)),
    ],
)
def test_words(word: Any, read: Budget) -> None:
    assert read_budget(word) == read


@pytest.mark.parametrize(
    ("word", "error"),
    [
        ("14", ValueError),
        ("GiB", ValueError),
        ("14 GiBs", ValueError),
        ("-3GiB", ValueError),
        ("0GiB", ValueError),
        ("all", ValueError),
        ("", ValueError),
        (0, ValueError),
        (-5, ValueError),
        (0.0, ValueError),
        (1.5, ValueError),
        (float("nan"), ValueError),
        (True, TypeError),
        (None, TypeError),
        ([1], TypeError),
    ],
    ids=repr,
)
def test_bad_words(word: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="budget") as caught:
        read_budget(word)
    assert repr(word) in str(caught.value)
    assert "14GiB" in str(caught.value), "the way out names a good value"


class FakeDevice:
    """What `torch.cuda` says of a device of 1,000 bytes, of which others have 300 and we 100."""

    def mem_get_info(self, device: Any) -> tuple[int, int]:
        return 600, 1000

    def memory_reserved(self, device: Any) -> int:
        return 100


def test_shares_of_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: FakeDevice())
    device = torch.device("cuda")
    assert budget_bytes(read_budget(0.9), device) == 900
    assert budget_bytes(read_budget("auto"), device) == 665  # 5 % less than what can be had
    assert budget_bytes(read_budget("1KiB"), device) == 1024


@pytest.mark.parametrize("word", ["auto", 0.5])
def test_a_cpu_needs_bytes(word: Any) -> None:
    with pytest.raises(ValueError, match=r"budget=.*cpu.*'4GiB'") as caught:
        budget_bytes(read_budget(word), torch.device("cpu"))
    assert repr(word) in str(caught.value)


@pytest.mark.parametrize(
    ("num_bytes", "text", "text_up"),
    [
        (5, "5 bytes", "5 bytes"),
        (1024, "1.0 KiB", "1.0 KiB"),
        (1025, "1.0 KiB", "1.1 KiB"),
        (3 * 2**30, "3.0 GiB", "3.0 GiB"),
    ],
)
def test_bytes_for_people(num_bytes: int, text: str, text_up: str) -> None:
    assert format_bytes(num_bytes) == text
    assert format_bytes(num_bytes, up=True) == text_up


# --- made-up steps


def option(held: int, seconds: float, recompute: int | None = 0) -> Option:
    return Option(held, held // 2, recompute, seconds)


def chain(num: int, rng: random.Random, alike: bool = False) -> Measurement:
    """Blocks one after the other, and back."""
    calls, segments, live, costs = [], [], 1_000_000, None
    for index in range(num):
        if costs is None or not alike:
            costs = (rng.randint(1000, 100_000), rng.uniform(1, 9), rng.uniform(0.2, 0.8))
        held, seconds, part = costs
        saving = option(int(held * part), seconds * 0.6, recompute=held // 8)
        options: dict[Action, Option] = {
            "recompute": option(0, seconds),
            "keep": option(held, 0.0, recompute=None)._replace(late=rng.randint(0, held)),
            "recompute_saving": saving,
        }
        calls.append(Call(index, options))
        segments.append(Segment("forward", index, live, live + held // 3))
        live += 5000
    segments.append(Segment("outside", None, live, live + rng.randint(0, 100_000)))
    for index in reversed(range(num)):
        held = calls[index].options["keep"].held
        segments.append(Segment("recompute", index, live, live + held + rng.randint(0, held)))
        segments.append(Segment("outside", None, live + held, live + held + held // 2))
        live -= 5000
    names = tuple(f"layers.{index}" for index in range(num))
    return Measurement(names, ("B",) * num, tuple(calls), tuple(segments), 1e3, {"parameters": 7})


def every_plan(step: Measurement) -> list[tuple[int, float]]:
    """Peak and seconds of each plan there is."""
    found = []
    for actions in itertools.product(ACTIONS, repeat=len(step.names)):
        predicted = predict(step, actions)
        found.append((predicted.peak, predicted.seconds))
    return found


@pytest.mark.parametrize("seed", range(8))
def test_against_every_plan(seed: int) -> None:
    """The optimum to the last digit, for alike and unlike blocks."""
    rng = random.Random(seed)
    step = chain(rng.choice([3, 5, 7]), rng, alike=seed % 2 == 0)
    plans = every_plan(step)
    low, high = min(peak for peak, _ in plans), predict(step, ["keep"] * len(step.names)).peak
    assert predict(step, least_peak(step, ACTIONS)).peak == low
    for share in (0, 0.01, 0.1, 0.3, 0.5, 0.8, 0.99, 1):
        budget = int(low + (high - low) * share)
        predicted = predict(step, fastest(step, budget, ACTIONS))
        assert predicted.peak <= budget
        best = min(seconds for peak, seconds in plans if peak <= budget)
        assert predicted.seconds == pytest.approx(best, rel=1e-9)


def test_twelve_blocks_against_every_plan() -> None:
    step = chain(12, random.Random(5))
    two: list[Action] = ["keep", "recompute"]
    low, high = (predict(step, [action] * 12).peak for action in reversed(two))
    predicted = [predict(step, actions) for actions in itertools.product(two, repeat=12)]
    for share in (0.1, 0.4, 0.7):
        budget = int(low + (high - low) * share)
        best = min(p.seconds for p in predicted if p.peak <= budget)
        assert predict(step, fastest(step, budget, two)).seconds == pytest.approx(best, rel=1e-9)


def test_a_thinned_front_is_within_a_percent(monkeypatch: pytest.MonkeyPatch) -> None:
    step = chain(7, random.Random(3))
    plans = every_plan(step)
    budget = sum(peak for peak, _ in plans) // len(plans)
    best = min(seconds for peak, seconds in plans if peak <= budget)
    monkeypatch.setattr("lightning_ckpt.core.budget.planner._NUM_POINTS", 40)
    predicted = predict(step, fastest(step, budget, ACTIONS))
    assert predicted.peak <= budget
    assert predicted.seconds <= 1.01 * best


def test_a_front_keeps_its_ends_and_nothing_that_is_beaten() -> None:
    held, seconds = np.array([5, 0, 5, 9, 7]), np.array([3.0, 8.0, 2.0, 1.0, 2.0])
    assert _front(held, seconds, 100).tolist() == [1, 2, 3]
    held, seconds = np.arange(100), np.arange(100, 0, -1.0)
    assert len(_front(held, seconds, 100)) == 100
    front = _front(held, seconds, 4).tolist()
    assert front[0] == 0, "what holds least may be all that fits later"
    assert front[-1] == 99
    assert len(front) == 5


@pytest.mark.parametrize("alike", [True, False])
def test_a_hundred_blocks_are_planned_at_once(alike: bool) -> None:
    step = chain(100, random.Random(1), alike)
    low, high = (predict(step, [action] * 100).peak for action in ("recompute", "keep"))
    taken = []
    for _ in range(3):  # the shortest: a busy machine adds to some
        begin = time.process_time()
        fastest(step, (low + high) // 2, ACTIONS)
        taken.append(time.process_time() - begin)
    assert min(taken) <= 0.2


def towers(rng: random.Random) -> Measurement:
    """Two towers whose backward goes in the order of their forward, and a block called twice."""
    step = chain(4, rng)
    forward, middle = list(step.segments[:4]), step.segments[4]
    backward = [step.segments[5 + 2 * index : 7 + 2 * index] for index in (2, 3, 0, 1)]
    calls = (*step.calls, Call(0, step.calls[0].options))
    forward.append(forward[0]._replace(call=4))
    again = [backward[3][0]._replace(call=4), backward[3][1]]
    segments = [*forward, middle, *again, *(s for pair in backward for s in pair)]
    return step._replace(calls=calls, segments=tuple(segments))


@pytest.mark.parametrize("seed", range(6))
def test_another_order_is_within_the_budget_too(seed: int) -> None:
    step = towers(random.Random(seed))
    plans = every_plan(step)
    low = predict(step, ["recompute"] * 4).peak
    high = predict(step, ["keep"] * 4).peak
    assert low < high
    for share in (0.0, 0.2, 0.5, 0.9, 1.0):
        budget = int(low + (high - low) * share)
        predicted = predict(step, fastest(step, budget, ACTIONS))
        assert predicted.peak <= budget
        assert predicted.seconds >= min(s for peak, s in plans if peak <= budget) - 1e-9


def test_a_block_that_was_not_called_is_recomputed() -> None:
    step = chain(3, random.Random(0))
    step = step._replace(names=(*step.names, "layers.3"), class_names=("B",) * 4)
    assert fastest(step, 10**9, ACTIONS) == ["keep", "keep", "keep", "recompute"]


def test_what_is_held_late() -> None:
    """Only in the segment right before the recompute."""
    recompute, keep = Option(0, 0, 0, 1.0), Option(10, 0, None, 0.0, late=100)
    step = Measurement(
        ("a",),
        ("A",),
        (Call(0, {"recompute": recompute, "keep": keep}),),
        (
            Segment("forward", 0, 0, 1000),
            Segment("outside", None, 0, 1040),
            Segment("outside", None, 0, 950),
            Segment("recompute", 0, 0, 900),
            Segment("outside", None, 0, 1030),
        ),
        5.0,
        {},
    )
    assert predict(step, ["keep"]).peak == 1060  # 950 + 10 + 100, above 1040 + 10
    assert predict(step, ["recompute"]).peak == 1040
    assert fastest(step, 1060, ["keep"]) == ["keep"]
    assert fastest(step, 1059, ["keep"]) == ["recompute"]


# --- what is said


def test_too_small_a_budget_names_the_least_and_the_largest_terms() -> None:
    step = chain(3, random.Random(0))._replace(
        terms={"parameters and buffers": 900_000, "gradients": 1000, "optimizer states": 2000}
    )
    least = predict(step, least_peak(step, ACTIONS)).peak
    with pytest.raises(BudgetTooSmall, match="budget=") as caught:
        fastest(step, least - 1, ACTIONS)
    assert caught.value.least == least
    assert str(least) in str(caught.value)
    assert fastest(step, least, ACTIONS)
    terms = caught.value.terms
    assert sum(terms.values()) == least
    assert next(iter(terms)) == "parameters and buffers"
    assert sorted(terms.values(), reverse=True) == list(terms.values())
    for name in list(terms)[:3]:
        assert name in str(caught.value)


def test_a_budget_above_plain_needs_keeps_all_and_says_so() -> None:
    step = chain(3, random.Random(0))
    plain = predict(step, ["keep"] * 3).peak
    actions = fastest(step, plain, ACTIONS)
    assert actions == ["keep"] * 3
    assert "nothing is checkpointed" in plan_within(plain, step, actions).notes[0]
    assert fastest(step, plain - 1, ACTIONS) != ["keep"] * 3


def test_a_plan_says_what_it_is_predicted_to_cost() -> None:
    step = chain(3, random.Random(0))
    plain = step.seconds - predict(step, ["recompute"] * 3).recompute_seconds
    (note,) = plan_within(2 * 2**20, step, ["recompute", "keep", "keep"]).notes
    assert "of the budget's 2.0 MiB" in note
    more = step.calls[0].options["recompute"].seconds / plain
    assert f"{1 + more:.2f} times" in note


@pytest.mark.parametrize("share", [0.5, 1.0, 1.5])
def test_no_word_of_times_that_contradict_each_other(share: float) -> None:
    """A step holds the blocks' forward and their recompute, and does not take less than both."""
    step = chain(3, random.Random(0))
    again = predict(step, ["recompute"] * 3).recompute_seconds
    (note,) = plan_within(
        2 * 2**20, step._replace(seconds=again * share), ["recompute", "keep", "keep"]
    ).notes
    assert note.endswith("of the budget's 2.0 MiB")


def test_blocks_that_cost_nothing_are_not_called_plain() -> None:
    """Backward does not come to the second of them, and it stays checkpointed."""
    step = chain(2, random.Random(0))
    free = step.calls[1]._replace(
        options={a: o._replace(seconds=0.0) for a, o in step.calls[1].options.items()}
    )
    (note,) = plan_within(
        2 * 2**20, step._replace(calls=(step.calls[0], free)), ["keep", "recompute"]
    ).notes
    assert note.endswith("of the budget's 2.0 MiB, with nothing computed again")


def test_a_step_in_which_nothing_was_seen() -> None:
    step = chain(2, random.Random(0))._replace(calls=(), segments=(Segment("outside", None, 0, 9),))
    actions = fastest(step, 10, ACTIONS)
    assert actions == ["recompute"] * 2
    assert "torch.compile" in plan_within(10, step, actions).notes[0]


# --- ranks, and alike blocks


def times(step: Measurement, factor: int) -> Measurement:
    """The same step with larger bytes."""
    calls = [
        call._replace(
            options={
                a: o._replace(held=o.held * factor, forward=o.forward * factor)
                for a, o in call.options.items()
            }
        )
        for call in step.calls
    ]
    segments = [s._replace(start=s.start * factor, peak=s.peak * factor) for s in step.segments]
    return step._replace(calls=tuple(calls), segments=tuple(segments))


def test_the_largest_bytes_of_all_ranks_win() -> None:
    step = chain(4, random.Random(2))
    larger = times(step, 2)
    both = merged([step, larger])
    assert both is not None
    assert both.segments == larger.segments
    assert both.calls == larger.calls
    budget = (predict(larger, ["recompute"] * 4).peak + predict(larger, ["keep"] * 4).peak) // 2
    _, actions = agreed([step, larger], [budget, budget + 10**9], ACTIONS)
    assert actions == fastest(larger, budget, ACTIONS)
    assert actions != fastest(step, budget, ACTIONS)


def test_ranks_that_computed_other_blocks() -> None:
    """One rank skipped a block: its plan would not fit the other's step."""
    step = times(chain(4, random.Random(2)), 2)
    skipped = step._replace(
        segments=tuple(s for s in step.segments if s.call != 3), calls=step.calls[:3]
    )
    assert merged([step, skipped]) is None
    budget = (predict(step, ["recompute"] * 4).peak + predict(step, ["keep"] * 4).peak) // 2
    for steps in ([step, skipped], [skipped, step]):
        _, actions = agreed(steps, [budget, budget], ACTIONS)
        assert len(actions) == 4
        assert all(predict(each, actions).peak <= budget for each in steps)


def test_alike_blocks_share_their_times() -> None:
    step = chain(3, random.Random(2), alike=True)
    calls = [
        call._replace(
            options={a: o._replace(seconds=o.seconds * f) for a, o in call.options.items()}
        )
        for call, f in zip(step.calls, (0.5, 1, 4), strict=True)
    ]
    step = step._replace(calls=tuple(calls))
    shared = [call.options["recompute"].seconds for call in pooled(step).calls]
    assert shared == [calls[1].options["recompute"].seconds] * 3
    unlike = step._replace(class_names=("A", "B", "C"))
    assert pooled(unlike) == unlike


def seconds_of(step: Measurement, actions: Sequence[Action]) -> float:
    return predict(step, actions).seconds


def test_less_time_with_more_budget() -> None:
    step = chain(6, random.Random(9))
    low, high = predict(step, ["recompute"] * 6).peak, predict(step, ["keep"] * 6).peak
    budgets = range(low, high + 1, (high - low) // 40)
    lost = [seconds_of(step, fastest(step, budget, ACTIONS)) for budget in budgets]
    assert lost == sorted(lost, reverse=True)
    assert lost[0] > lost[-1]
