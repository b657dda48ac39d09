"""A step of a size that was not measured, from those of sizes that were."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from test_budget import ACTIONS, chain, every_plan, towers
from test_offload_planned import offloading as offloading_chain

from lightning_ckpt.core.budget.able import choices
from lightning_ckpt.core.budget.costs import Call, Measurement, Option, Segment, predict
from lightning_ckpt.core.budget.fitted import canonical, fitted
from lightning_ckpt.core.budget.sizes import Size


def size(*dims: int) -> Size:
    return Size(0, (len(dims),), dims)


def sized(template: Measurement, bytes_of: Callable[[int], int], seconds: float) -> Measurement:
    """The same step with other bytes: `bytes_of` is given the ones that it has."""

    def option(old: Option) -> Option:
        recompute = None if old.recompute is None else bytes_of(old.recompute)
        held, forward = bytes_of(old.held), bytes_of(old.forward)
        return Option(held, forward, recompute, old.seconds * seconds, bytes_of(old.late))

    calls = tuple(
        Call(call.block, {a: option(o) for a, o in call.options.items()}) for call in template.calls
    )
    segments = tuple(
        Segment(s.kind, s.call, bytes_of(s.start), bytes_of(s.peak)) for s in template.segments
    )
    return template._replace(calls=calls, segments=segments, seconds=seconds)


TEMPLATE = canonical(chain(4, random.Random(0)))


def attention(rows: int, length: int, noise: Callable[[], float] = lambda: 1.0) -> Measurement:
    """Bytes with a constant, a linear and a quadratic part, each number its own mix."""

    def bytes_of(seed: int) -> int:
        a, b, c = seed % 97, seed % 89, seed % 7
        return int((1000 * a + rows * length * b + rows * length**2 * c) * noise())

    return sized(TEMPLATE, bytes_of, seconds=rows * length / 100)


def without_seconds(step: Measurement) -> Measurement:
    return sized(step, lambda n: n, 0.0)


LENGTHS = [10, 25, 60, 100]


@pytest.mark.parametrize("length", [10, 11, 24, 47, 75, 99, 100])
def test_a_length_between_is_exact(length: int) -> None:
    steps = [attention(4, each) for each in LENGTHS]
    found = fitted([size(4, each) for each in LENGTHS], steps, size(4, length))
    assert found is not None
    assert without_seconds(found) == without_seconds(attention(4, length))


def test_lengths_and_rows_both_vary() -> None:
    rng = random.Random(1)
    sizes = [(rng.randint(1, 9), rng.randint(5, 99)) for _ in range(14)]
    steps = [attention(*each) for each in sizes]
    found = 0
    for _ in range(20):
        own = rng.randint(1, 9), rng.randint(5, 99)
        made = fitted([size(*each) for each in sizes], steps, size(*own))
        if made is not None:
            found += 1
            assert without_seconds(made) == without_seconds(attention(*own))
    assert found > 5


def test_seconds_are_those_of_the_nearest_size() -> None:
    """They need only rank the actions, and noise in them must not be made larger."""
    steps = [attention(4, each) for each in LENGTHS]
    found = fitted([size(4, each) for each in LENGTHS], steps, size(4, 55))
    assert found is not None
    assert found.seconds == attention(4, 60).seconds
    assert [c.options["recompute"].seconds for c in found.calls] == [
        c.options["recompute"].seconds for c in attention(4, 60).calls
    ]


@pytest.mark.parametrize(
    ("measured", "own", "why"),
    [
        ([], (4, 20), "nothing is measured"),
        ([10, 60], (4, 20), "three features from two sizes"),
        ([10, 25, 60], (4, 20), "no size is left to see whether the fit is exact"),
        (LENGTHS, (4, 101), "longer than all"),
        (LENGTHS, (4, 4), "less than half of the shortest"),
        (LENGTHS, (1, 50), "less than half of the rows"),
        ([10, 11, 12, 100], (4, 55), "far from all: an error would be many times as large"),
    ],
)
def test_what_must_be_measured_first(measured: list[int], own: tuple[int, int], why: str) -> None:
    steps = [attention(4, each) for each in measured]
    assert fitted([size(4, each) for each in measured], steps, size(*own)) is None, why


@pytest.mark.parametrize(("own", "taken_as"), [((4, 6), (4, 10)), ((3, 50), (4, 50))])
def test_below_the_smallest_it_is_taken_as_that(
    own: tuple[int, int], taken_as: tuple[int, int]
) -> None:
    steps = [attention(4, each) for each in LENGTHS]
    found = fitted([size(4, each) for each in LENGTHS], steps, size(*own))
    assert found is not None
    assert without_seconds(found) == without_seconds(attention(*taken_as))


def test_where_it_is_not_exact_it_is_too_large() -> None:
    """Experts get more tokens or fewer, so bytes go by more than the size."""
    over, num = [], 0
    for seed in range(30):
        rng = random.Random(seed)
        noise = lambda rng=rng: rng.uniform(0.97, 1.03)  # noqa: E731
        lengths = [10, 18, 30, 44, 60, 75, 88, 100]
        steps = [attention(4, each, noise) for each in lengths]
        length = rng.randint(10, 100)
        found = fitted([size(4, each) for each in lengths], steps, size(4, length))
        truth = attention(4, length, noise)
        assert found is not None
        num += 1
        for action in ACTIONS:
            over.append(predict(found, [action] * 4).peak / predict(truth, [action] * 4).peak)
    assert num == 30
    assert min(over) >= 1
    assert sorted(over)[len(over) // 2] < 1.3


def test_a_fit_that_is_not_exact_needs_more_sizes() -> None:
    rng = random.Random(0)
    lengths = [10, 30, 60, 100]
    steps = [attention(4, each, lambda: rng.uniform(0.97, 1.03)) for each in lengths]
    assert fitted([size(4, each) for each in lengths], steps, size(4, 50)) is None


def test_blocks_in_another_order_are_not_mixed() -> None:
    steps = [attention(4, each) for each in LENGTHS]
    steps[1] = steps[1]._replace(segments=steps[1].segments[1:])
    assert fitted([size(4, each) for each in LENGTHS], steps, size(4, 50)) is None


def test_further_numbers_of_an_option_are_fitted_too() -> None:
    def larger(length: int) -> Measurement:
        step = attention(4, length)
        calls = tuple(
            call._replace(
                options={a: o._replace(output=3 * length**2) for a, o in call.options.items()}
            )
            for call in step.calls
        )
        return step._replace(calls=calls)

    found = fitted([size(4, e) for e in LENGTHS], [larger(e) for e in LENGTHS], size(4, 58))
    assert found is not None
    assert found.calls[0].options["keep"].output == 3 * 58**2


def test_offload_is_known_of_measured_sizes_alone() -> None:
    """What is given back must not be taken too large."""

    def offloading(length: int) -> Measurement:
        step = attention(4, length)
        calls = []
        for call in step.calls:
            moved = call.options["recompute"]._replace(moved=length, inputs=length)
            options = {**call.options, "recompute_offloaded": moved}
            calls.append(call._replace(options=options, leaves=2, returns=3))
        return step._replace(calls=tuple(calls))

    found = fitted([size(4, e) for e in LENGTHS], [offloading(e) for e in LENGTHS], size(4, 58))
    assert found is not None
    assert "recompute_offloaded" not in found.calls[0].options


def test_fewer_segments_have_offload_leave_and_return_where_it_did() -> None:
    """Or later, and earlier."""
    step = offloading_chain(4, random.Random(0))
    segments, calls = [], list(step.calls)
    at = []
    for segment in step.segments:  # each stretch outside of blocks is cut in three
        at.append(len(segments))
        cut = [segment] * 3 if segment.kind == "outside" else [segment]
        segments += cut
    cut_calls = [
        c._replace(leaves=None if c.leaves is None else at[c.leaves], returns=at[c.returns])
        for c in calls
    ]
    cut_step = step._replace(segments=tuple(segments), calls=tuple(cut_calls))
    made = canonical(cut_step)
    able = choices(step, ["keep", "recompute_offloaded", "keep_offloaded"])
    for actions in itertools.product(*able):
        assert predict(made, actions).peak == predict(step, actions).peak


@pytest.mark.parametrize("make", [chain, lambda num, rng: towers(rng)])
@pytest.mark.parametrize("seed", range(3))
def test_fewer_segments_predict_the_same(make: Callable[..., Measurement], seed: int) -> None:
    """However a step was cut where nothing was computed in blocks, each plan has the same peak."""
    step = make(4, random.Random(seed))
    cut = []
    for segment in step.segments:
        if segment.kind == "outside":
            cut += [
                segment._replace(peak=segment.peak // 2),
                segment._replace(peak=segment.peak - 9),
            ]
        cut.append(segment)
    many = step._replace(segments=tuple(cut))
    assert every_plan(canonical(step)) == every_plan(step)
    assert every_plan(canonical(many)) == every_plan(many)
    kinds = [(s.kind, s.call) for s in canonical(step).segments]
    assert [(s.kind, s.call) for s in canonical(many).segments] == kinds


def test_rows_and_lengths_that_the_measured_ones_do_not_tell() -> None:
    """There are enough, and these are in their range: but one alone has other rows."""
    measured = [(4, 10), (4, 25), (4, 60), (4, 100), (8, 100)]
    sizes, steps = [size(*each) for each in measured], [attention(*each) for each in measured]
    assert fitted(sizes, steps, size(4, 30)) is not None
    assert fitted(sizes, steps, size(6, 30)) is None


def test_beyond_the_range_only_where_it_is_exact() -> None:
    rng = random.Random(0)
    lengths = [10, 20, 30, 40, 50, 60, 70, 80]
    sizes = [size(4, length) for length in lengths]
    exact = [attention(4, length) for length in lengths]
    noisy = [attention(4, length, lambda: rng.uniform(1, 1.1)) for length in lengths]
    assert fitted(sizes, exact, size(4, 84)) is None
    found = fitted(sizes, exact, size(4, 84), reach=1.1)
    assert found is not None
    assert without_seconds(found) == without_seconds(attention(4, 84))
    assert fitted(sizes, exact, size(4, 89), reach=1.1) is None
    assert fitted(sizes, noisy, size(4, 79)) is not None
    assert fitted(sizes, noisy, size(4, 84), reach=1.1) is None
