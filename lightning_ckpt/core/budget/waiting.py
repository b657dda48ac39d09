"""What it would mean for a call if what it saves waited elsewhere: bytes, and time.

Note: [When it is away]
An offload by plan sends what a call saves at once, and lets it go when the next call of a block has
ended its forward; it fetches it when the call that comes before it in backward begins. So between
these two, which the measured step shows, its bytes are gone, whatever the speed of the link.

Note: [What it costs]
The link is one resource in each direction, and each call's copy has the compute of one call to hide
behind: out its own forward (the next one belongs to the next copy), in the backward of the call
before. What is longer is waited for. A hidden copy costs a little as well, so that of two plans
which fit the one that moves less is taken.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lightning_ckpt.core.budget.costs import Call, Kind, Option
from lightning_ckpt.core.budget.inputs import Saved
from lightning_ckpt.core.plan import Choice

_HIDDEN_SHARE = 0.02  # of a copy's time; it was not measured, and only decides between equals


class Link(NamedTuple):
    """The way to where tensors wait.

    Attributes:
        out_bytes_per_second, in_bytes_per_second: speeds.
        call_seconds: what handing over and taking back costs the compute, for each call.
        room_bytes: how much may wait there at once; None: there is no limit.
    """

    out_bytes_per_second: float
    in_bytes_per_second: float
    call_seconds: float = 0.0
    room_bytes: int | None = None

    def seconds(self, num_bytes: int, out_window: float, in_window: float) -> float:
        """Note: [What it costs]."""
        out, back = num_bytes / self.out_bytes_per_second, num_bytes / self.in_bytes_per_second
        waited = max(0.0, out - out_window) + max(0.0, back - in_window)
        return waited + _HIDDEN_SHARE * (out + back) + self.call_seconds


class Window(NamedTuple):
    """Between which segments of the step a call's tensors may be away.

    Attributes:
        leaves: the first without them.
        returns: the first that has them back.
        before: the call that computes meanwhile.
    """

    leaves: int
    returns: int
    before: int


class Movable(NamedTuple):
    """What could wait elsewhere of what a call saves.

    Attributes:
        inputs: of its arguments, without those that stay (two calls in a row get them).
        made_bytes: of what it made, if it is kept.
        result_bytes: of results that it saves, and that the next call has as its input.
        other_bytes: of what else its operations read, if it is kept.
    """

    inputs: Saved
    made_bytes: int
    result_bytes: int
    other_bytes: int


def windows(segments: Iterable[tuple[Kind, int | None]]) -> dict[int, Window]:
    """The window of each call that has one. The last call of a forward has none, nor one that was
    recomputed twice."""
    found: dict[int, Window] = {}
    leaves: dict[int, int] = {}
    begun: list[tuple[int, int]] = []  # recomputes of this wave: call, segment
    last: int | None = None
    seen: set[int] = set()
    for index, (kind, call) in enumerate(segments):
        if call is None:
            continue
        if kind == "forward":
            if last is not None and not begun:
                leaves[last] = index + 1
            begun, last = [], call
        elif call in seen:
            found.pop(call, None)
        else:
            seen.add(call)
            if begun and call in leaves and leaves[call] < begun[-1][1]:
                found[call] = Window(leaves[call], begun[-1][1], begun[-1][0])
            begun.append((call, index))
    return found


def offloaded(
    options: dict[Choice, Option], movable: Movable, link: Link, in_window: float
) -> dict[Choice, Option]:
    """The choices that there are beside those that keep everything where it is.

    Args:
        options: those of the call.
        movable: what could be moved.
        link: the way.
        in_window: seconds of the backward of the call before.
    """
    found: dict[Choice, Option] = {}
    again, kept = options["recompute"], options["keep"]
    alone, twice = movable.inputs.alone_bytes, movable.inputs.shared_bytes
    if alone:
        seconds = again.seconds + link.seconds(alone + twice, again.seconds, in_window)
        found["recompute_offloaded"] = Option(
            0, 0, 0, seconds, moved=alone + twice, inputs=alone, twice=twice
        )
    made, twice = min(movable.made_bytes, kept.held), twice + movable.other_bytes
    if alone + made:
        moved = alone + made + movable.result_bytes + twice
        found["keep_offloaded"] = Option(
            kept.held,
            kept.forward,
            None,
            link.seconds(moved, again.seconds, in_window),
            moved=moved,
            away=made,
            inputs=alone,
            result=movable.result_bytes,
            twice=twice,
        )
    return found


def within_room(calls: Sequence[Call], num_waves: int, room_bytes: int | None) -> tuple[Call, ...]:
    """The calls without the choices that would not find room: what has none stays on the device,
    where nobody expects it. First comes first, and inputs before what is kept.

    Args:
        calls: of the step.
        num_waves: how often its forward was followed by a backward.
        room_bytes: None: there is no limit.
    """
    if room_bytes is None:
        return tuple(calls)
    free = room_bytes * max(num_waves, 1)
    options = [dict(call.options) for call in calls]
    taken = [0] * len(calls)
    for choice in _BY_SIZE:
        for index, call in enumerate(calls):
            if choice not in call.options:
                continue
            more = max(call.options[choice].moved - taken[index], 0)
            if more > free:
                del options[index][choice]
            else:
                free, taken[index] = free - more, taken[index] + more
    return tuple(c._replace(options=o) for c, o in zip(calls, options, strict=True))


_BY_SIZE: tuple[Choice, ...] = ("recompute_offloaded", "keep_offloaded")
