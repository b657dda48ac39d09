"""What one step cost, as plain data, and what it would cost under any other plan.

The step was taken with every block recomputed, so it shows of each block what its activations take
(the bytes that its recompute adds) and how long they take to compute. For another plan the same
step is gone through again, segment by segment: what kept blocks hold is added between their forward
and their recompute, and their recompute is left out.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any, Literal, NamedTuple, TypeAlias

from lightning_ckpt.core.plan import Choice, is_offloaded

Kind = Literal["outside", "forward", "recompute"]
Actions: TypeAlias = Sequence[Choice]  # one for each block


class Option(NamedTuple):
    """What a choice would mean for one call of a block, against "recompute".

    Attributes:
        held: bytes that it holds between forward and backward.
        forward: bytes by which its forward's peak is higher.
        recompute: bytes by which its recompute's peak is higher; None: there is no recompute.
        seconds: how long it computes in backward before gradients flow, and is waited for copies.
        late: bytes that it holds beside in the segment right before the recompute: those of a
            result that is its own to hold (a last ReLU saves it), and which until then the next
            block held as its input.
        output: of those that it holds, bytes of a result which the measured step has in as the
            next block's input.
        moved: bytes that wait elsewhere.
        away: bytes that it holds less while they do, but for its inputs.
        inputs: bytes of these.
        result: of what is moved, bytes of a result that is the next block's input. Where that one
            does not offload, they are there twice from their return until the recompute.
        twice: bytes that others hold as well, from their return to the end of its backward.
    """

    held: int
    forward: int
    recompute: int | None
    seconds: float
    late: int = 0
    output: int = 0
    moved: int = 0
    away: int = 0
    inputs: int = 0
    result: int = 0
    twice: int = 0


class Call(NamedTuple):
    """One call of a block.

    Attributes:
        block: its index in the plan.
        options: what can be done with it; "recompute" can always.
        leaves: the segment from which on is gone what it moved elsewhere; None: it never is.
        gone: the same of its inputs, if the model's code holds them for longer.
        returns: the segment from which on that is there again.
        producers: the calls that gave its inputs.
    """

    block: int
    options: dict[Choice, Option]
    leaves: int | None = None
    gone: int = 0
    returns: int = 0
    producers: tuple[int, ...] = ()


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
    doubled, given = [0] * len(chosen), set[int]()
    for index, (call, option) in enumerate(zip(step.calls, chosen, strict=True)):
        if option.moved:
            doubled[index] = sum(chosen[producer].output for producer in call.producers)
            given.update(call.producers)
    changes = [0] * (len(step.segments) + 1)
    for index, span in spans(step).items():
        option = chosen[index]._replace(result=0) if index in given else chosen[index]
        for at, num_bytes in span.changes(option, doubled[index]):
            changes[at] += num_bytes
    comes = next_recomputes(step)
    peak = worst = 0
    for index, (segment, held) in enumerate(zip(step.segments, accumulate(changes), strict=False)):
        more = 0 if segment.call is None else rise(segment, chosen[segment.call])
        late = chosen[comes[index]].late if index in comes else 0
        if more is not None and segment.peak + held + late + more > peak:
            peak, worst = segment.peak + held + late + more, index
    again = sum(option.seconds for option in chosen)
    all_again = sum(call.options["recompute"].seconds for call in step.calls)
    return Prediction(peak, step.seconds - all_again + again, again, worst)


class Span(NamedTuple):
    """The segments of one call.

    Attributes:
        begins: the first after its forward.
        leaves, returns: between these what was moved is elsewhere; alike, if it never is.
        gone: from here on its inputs are, too.
        ends: that of its recompute, from which on the measured bytes have its activations in; one
            beyond the last without a recompute.
        done: the first after its backward.
    """

    begins: int
    leaves: int
    gone: int
    returns: int
    ends: int
    done: int

    def changes(self, option: Option, doubled: int = 0) -> list[tuple[int, int]]:
        """At which segments the call begins to hold so many bytes more, or less.

        Args:
            option: what is chosen for it.
            doubled: bytes of inputs that were moved, and are held by the call that gave them.
        """
        inputs, twice = option.inputs - doubled, option.twice + doubled
        return [
            (self.begins, option.held),
            (self.leaves, -option.away),
            (self.gone, -inputs),
            (self.returns, option.away + inputs + twice + option.result),
            (self.ends, -option.result - option.held),
            (self.done, -twice),
        ]


def spans(step: Measurement) -> dict[int, Span]:
    """Those of each call."""
    end = len(step.segments)
    recomputes = [(i, s.call) for i, s in enumerate(step.segments) if s.kind == "recompute"]
    last = {call: (i, n) for n, (i, call) in enumerate(recomputes)}
    found = {}
    for index, segment in enumerate(step.segments):
        if segment.kind != "forward" or segment.call is None:
            continue
        ends, number = last.get(segment.call, (end, len(recomputes)))
        done = recomputes[number + 1][0] if number + 1 < len(recomputes) else end
        call = step.calls[segment.call]
        returns = min(max(call.returns, index + 1), ends)
        leaves = returns if call.leaves is None else min(max(call.leaves, index + 1), returns)
        gone = min(max(call.gone, leaves), returns)
        found[segment.call] = Span(index + 1, leaves, gone, returns, ends, done)
    return found


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


def _alike(step: Measurement, call: Call, action: Choice) -> tuple[Any, ...]:
    is_reached = call.options["recompute"].seconds > 0
    return step.class_names[call.block], call.options["keep"].held, is_reached, action


def merged(steps: Sequence[Measurement]) -> Measurement | None:
    """One step that is as large as the largest of several at each place, for ranks that must agree;
    None if they did not compute the same blocks in the same order."""
    if not are_alike(steps):
        return None
    first = steps[0]
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


def are_alike(steps: Sequence[Measurement]) -> bool:
    """Whether they computed the same blocks in the same order."""
    order = _order(steps[0])
    return all(_order(step) == order for step in steps[1:])


def _order(step: Measurement) -> tuple[Any, ...]:
    order = [(segment.kind, segment.call) for segment in step.segments]
    able = [sorted(a for a in call.options if not is_offloaded(a)) for call in step.calls]
    return order, [(call.block, here) for call, here in zip(step.calls, able, strict=True)]


def _merged_call(calls: Sequence[Call]) -> Call:
    first = calls[0]
    able = [a for a in first.options if all(a in call.options for call in calls)]
    options = {choice: _largest([call.options[choice] for call in calls]) for choice in able}
    leaves = [call.leaves for call in calls]
    return Call(
        first.block,
        options,
        None if None in leaves else max(each for each in leaves if each is not None),
        max(call.gone for call in calls),
        min(call.returns for call in calls),
        tuple(sorted({index for call in calls for index in call.producers})),
    )


def _largest(same: Sequence[Option]) -> Option:
    """The dearest at each place: what is given back is the least."""
    most = {
        name: None if None in values else max(values)
        for name, values in zip(Option._fields, zip(*same, strict=True), strict=True)
    }
    least = {name: min(getattr(option, name) for option in same) for name in ("away", "inputs")}
    return Option(**{**most, **least})


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
