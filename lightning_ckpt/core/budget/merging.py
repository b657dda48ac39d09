"""Several measurements as one: of calls that are alike, and of ranks that must agree."""

from collections.abc import Sequence
from statistics import median
from typing import Any

from lightning_ckpt.core.budget.costs import Call, Measurement, Option, Segment
from lightning_ckpt.core.plan import Choice, is_offloaded


def pooled(step: Measurement) -> Measurement:
    """The same, with one time for all calls that are alike, the median of theirs."""
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


def joined(before: Sequence[Measurement], step: Measurement) -> tuple[Measurement, ...]:
    """What is known of a size, and one step more: one as large as both where they are alike."""
    for index, known in enumerate(before):
        if (both := merged([known, step])) is not None:
            return *before[:index], both, *before[index + 1 :]
    return *before, step


def with_more(step: Measurement, term: str, num_bytes: int) -> Measurement:
    """The same with so many bytes of a term all along, if it has fewer."""
    known = step.terms.get(term, 0)
    more = num_bytes - known
    if more <= 0:
        return step
    segments = (s._replace(start=s.start + more, peak=s.peak + more) for s in step.segments)
    return step._replace(segments=tuple(segments), terms={**step.terms, term: num_bytes})


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
