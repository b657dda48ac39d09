"""What one step cost, as plain data, and what it would cost under any other plan.

The step was taken with every block recomputed, so it shows of each block what its activations take
(the bytes that its recompute adds) and how long they take to compute. For another plan the same
step is gone through again, segment by segment: what kept blocks hold is added between their forward
and their recompute, and their recompute is left out.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

from lightning_ckpt.core.plan import Choice

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
    peaks = predicted_peaks(step, actions)
    worst = max(range(len(peaks)), key=peaks.__getitem__, default=0)
    again = sum(call.options[actions[call.block]].seconds for call in step.calls)
    all_again = sum(call.options["recompute"].seconds for call in step.calls)
    peak = peaks[worst] if peaks else 0
    return Prediction(peak, step.seconds - all_again + again, again, worst)


def predicted_peaks(step: Measurement, actions: Actions) -> list[int]:
    """The most live bytes in each segment under these actions; 0 where it is left out."""
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
    comes, peaks = next_recomputes(step), []
    for index, (segment, held) in enumerate(zip(step.segments, accumulate(changes), strict=False)):
        more = 0 if segment.call is None else rise(segment, chosen[segment.call])
        late = chosen[comes[index]].late if index in comes else 0
        peaks.append(0 if more is None else segment.peak + held + late + more)
    return peaks


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
