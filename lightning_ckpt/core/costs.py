"""What one step cost, as plain data, and what it would cost under any other plan.

The step was taken with every block recomputed, so it shows of each block what its activations take
(the bytes that its recompute adds) and how long they take to compute. For another plan the same
step is gone through again, segment by segment: what kept blocks hold is added between their forward
and their recompute, and their recompute is left out.
"""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

from lightning_ckpt.core.plan import Action

Kind = Literal["outside", "forward", "recompute"]
Actions: TypeAlias = Sequence[Action]  # one for each block


class Option(NamedTuple):
    """What an action would mean for one call of a block, against "recompute".

    Attributes:
        held: bytes that it holds between forward and backward.
        forward: bytes by which its forward's peak is higher.
        recompute: bytes by which its recompute's peak is higher; None: there is no recompute.
        seconds: how long it computes in backward before gradients flow.
        late: bytes that it holds beside in the segment right before the recompute: those of a
            result that is its own to hold (a last ReLU saves it), and which until then the next
            block held as its input.
    """

    held: int
    forward: int
    recompute: int | None
    seconds: float
    late: int = 0


class Call(NamedTuple):
    """One call of a block.

    Attributes:
        block: its index in the plan.
        options: what can be done with it; "recompute" can always.
    """

    block: int
    options: dict[Action, Option]


class Segment(NamedTuple):
    """A stretch of the step.

    Attributes:
        kind: the forward or the recompute of a call, or what lies outside of them.
        call: which call; None outside.
        start: live bytes when it began.
        peak: the most live bytes in it.
    """

    kind: Kind
    call: int | None
    start: int
    peak: int


class Measurement(NamedTuple):
    """A step with every block recomputed, as it is once the optimizer has its states.

    Attributes:
        names: of the blocks, in the plan's order.
        class_names: of the blocks.
        calls: of the blocks, in order.
        segments: the whole step, in order.
        seconds: how long it took.
        terms: bytes that no plan can change, by what they are for.
    """

    names: tuple[str, ...]
    class_names: tuple[str, ...]
    calls: tuple[Call, ...]
    segments: tuple[Segment, ...]
    seconds: float
    terms: Mapping[str, int]


class Prediction(NamedTuple):
    """What a plan would cost.

    Attributes:
        peak: bytes.
        seconds: of the step.
        recompute_seconds: of what backward computes again.
        worst: index of the segment with the peak.
    """

    peak: int
    seconds: float
    recompute_seconds: float
    worst: int


def predict(step: Measurement, actions: Actions) -> Prediction:
    """Go through the measured step again under other actions, one for each block."""
    chosen = [call.options[actions[call.block]] for call in step.calls]
    peak = worst = held = 0
    comes = next_recomputes(step)
    for index, (segment, ends, begins) in enumerate(_walk(step)):
        held -= 0 if ends is None else chosen[ends].held
        more = 0 if segment.call is None else rise(segment, chosen[segment.call])
        late = chosen[comes[index]].late if index in comes else 0
        if more is not None and segment.peak + held + late + more > peak:
            peak, worst = segment.peak + held + late + more, index
        held += 0 if begins is None else chosen[begins].held
    again = sum(option.seconds for option in chosen)
    all_again = sum(call.options["recompute"].seconds for call in step.calls)
    return Prediction(peak, step.seconds - all_again + again, again, worst)


def with_alive(step: Measurement) -> Iterator[tuple[Segment, frozenset[int]]]:
    """Each segment, with the calls whose activations would be held in it if they were kept."""
    alive: set[int] = set()
    for segment, ends, begins in _walk(step):
        alive -= {ends}
        yield segment, frozenset(alive)
        alive |= set() if begins is None else {begins}


def _walk(step: Measurement) -> Iterator[tuple[Segment, int | None, int | None]]:
    """Each segment, with the call that need not hold its activations any more, since the measured
    bytes have them in from here on, and the call that must hold them after it."""
    last = {s.call: i for i, s in enumerate(step.segments) if s.kind == "recompute"}
    for index, segment in enumerate(step.segments):
        is_last = segment.kind == "recompute" and last[segment.call] == index
        yield (
            segment,
            segment.call if is_last else None,
            segment.call if segment.kind == "forward" else None,  # without a recompute: to the end
        )


def next_recomputes(step: Measurement) -> dict[int, int]:
    """By segment, the call whose recompute comes right after it."""
    following = enumerate(step.segments[1:])
    return {i: s.call for i, s in following if s.kind == "recompute" and s.call is not None}


def rise(segment: Segment, option: Option) -> int | None:
    """How much higher the peak of a call's segment is under an option; None: it is left out."""
    return option.forward if segment.kind == "forward" else option.recompute


def pooled(step: Measurement) -> Measurement:
    """The same, with one time for all calls that are alike, the median of theirs. Calls that
    backward did not come to would hold what others of their class do."""
    largest: dict[str, Option] = {}
    for call in step.calls:
        if kept := call.options.get("keep"):
            name = step.class_names[call.block]
            largest[name] = max(kept, largest.get(name, kept), key=lambda each: each.held)
    step = step._replace(calls=tuple(_filled(step, call, largest) for call in step.calls))
    seconds: dict[Any, list[float]] = {}
    for call in step.calls:
        for action, option in call.options.items():
            seconds.setdefault(_alike(step, call, action), []).append(option.seconds)
    calls = [
        call._replace(
            options={
                action: option._replace(seconds=median(seconds[_alike(step, call, action)]))
                for action, option in call.options.items()
            }
        )
        for call in step.calls
    ]
    return step._replace(calls=tuple(calls))


def _filled(step: Measurement, call: Call, largest: dict[str, Option]) -> Call:
    kept = largest.get(step.class_names[call.block], Option(0, 0, None, 0.0))
    return call._replace(options={"keep": kept, **call.options})


def _alike(step: Measurement, call: Call, action: Action) -> tuple[Any, ...]:
    is_reached = call.options["recompute"].seconds > 0
    return step.class_names[call.block], call.options["keep"].held, is_reached, action


def merged(steps: Sequence[Measurement]) -> Measurement | None:
    """One step that is as large as the largest of several at each place, for ranks that must agree;
    None if they did not compute the same blocks in the same order."""
    first = steps[0]
    if any(_order(step) != _order(first) for step in steps):
        return None
    calls = [_merged_call(same) for same in zip(*(step.calls for step in steps), strict=True)]
    segments = [
        Segment(same[0].kind, same[0].call, max(s.start for s in same), max(s.peak for s in same))
        for same in zip(*(step.segments for step in steps), strict=True)
    ]
    return first._replace(
        calls=tuple(calls),
        segments=tuple(segments),
        seconds=max(step.seconds for step in steps),
        terms={name: max(step.terms[name] for step in steps) for name in first.terms},
    )


def _order(step: Measurement) -> tuple[Any, ...]:
    order = [(segment.kind, segment.call) for segment in step.segments]
    return order, [(call.block, sorted(call.options)) for call in step.calls]


def _merged_call(calls: Sequence[Call]) -> Call:
    options = {
        action: Option(
            max(call.options[action].held for call in calls),
            max(call.options[action].forward for call in calls),
            None
            if action == "keep"
            else max(call.options[action].recompute or 0 for call in calls),
            max(call.options[action].seconds for call in calls),
            max(call.options[action].late for call in calls),
        )
        for action in calls[0].options
    }
    return Call(calls[0].block, options)


def choices(step: Measurement, allowed: Sequence[Action]) -> list[list[Action]]:
    """For each block, the actions that all its calls can take. What was not called is recomputed,
    since nothing is known of it, and so is what backward did not come to: that costs nothing."""
    reached = {segment.call for segment in step.segments if segment.kind == "recompute"}
    able: list[set[Action] | None] = [None] * len(step.names)
    for index, call in enumerate(step.calls):
        here = set(call.options) if index in reached else set()
        before = able[call.block]
        able[call.block] = here if before is None else here & before
    return [
        ["recompute", *(a for a in allowed if a != "recompute" and seen and a in seen)]
        for seen in able
    ]
