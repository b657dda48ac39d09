"""One training step over time: live bytes, and when forward, recompute, backward and update ran.

recorder = TimelineRecorder(model, blocks)
...                                  # a step between `start_phase` and `finish`
timeline = recorder.finish(source.events)
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from time import time_ns
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ckpt.core.memory.breakdown import Event
from lightning_ckpt.core.watchers import Phase, Watch, watching

Kind = Literal["forward", "recompute", "backward", "optimizer"]


class Span(NamedTuple):
    """A stretch of the step.

    Attributes:
        kind: what ran.
        start, end: seconds since the step began.
        block: number of the block, None for a phase of the whole step.
    """

    kind: Kind
    start: float
    end: float
    block: int | None = None


@dataclass(frozen=True)
class Timeline:
    """One step.

    Attributes:
        points: (seconds since the step began, live bytes), in order of time.
        phases: of the whole step.
        blocks: of single blocks; "backward" of a recomputed block has its "recompute" in it.
        block_names: by number.
    """

    points: tuple[tuple[float, int], ...]
    phases: tuple[Span, ...]
    blocks: tuple[Span, ...]
    block_names: tuple[str, ...]


class TimelineRecorder:
    """Records one step from now on, by forward hooks on the blocks and hooks on their outputs.

    Args:
        blocks: (name, module) of each block.
        read_bytes: reads the live bytes at each mark, where no events tell them.
    """

    def __init__(
        self, blocks: Sequence[tuple[str, nn.Module]], read_bytes: Callable[[], int] | None = None
    ) -> None:
        self._began = time_ns()
        self._read_bytes = read_bytes
        self._names = tuple(name for name, _ in blocks)
        self._numbers = {id(module): number for number, (_, module) in enumerate(blocks)}
        self._points: list[tuple[float, int]] = []
        self._phases: list[Span] = []
        self._phase: tuple[Kind, float] | None = None
        self._spans: list[Span] = []
        self._open: dict[tuple[Kind, int], float] = {}
        self._backward: int | None = None  # the block whose backward runs
        self._undo = ExitStack()
        for number, (_, module) in enumerate(blocks):
            self._hook(number, module)
        self._undo.enter_context(watching(self._watch))

    def start_phase(self, kind: Kind | None) -> None:
        """A phase of the step begins, and the one before ends; None: it only ends."""
        now = self._now()
        if self._phase is not None:
            self._phases.append(Span(self._phase[0], self._phase[1], now))
            self._end_backward(now)
        self._phase = None if kind is None else (kind, now)

    def finish(self, events: Iterable[Event] = ()) -> Timeline:
        """The step is over; `events` are those of its source, where it has them."""
        self.start_phase(None)
        self.stop()
        points = self._points_of(events) or self._points
        return Timeline(
            tuple(sorted(points, key=lambda point: point[0])),
            tuple(self._phases),
            tuple(sorted(self._spans, key=lambda span: span.start)),
            self._names,
        )

    def stop(self) -> None:
        """Take the hooks off."""
        self._undo.close()

    def _hook(self, number: int, module: nn.Module) -> None:
        for handle in (
            module.register_forward_pre_hook(partial(self._enter, number)),
            module.register_forward_hook(partial(self._leave, number), always_call=True),
        ):
            self._undo.callback(handle.remove)

    def _enter(self, number: int, *_: Any) -> None:
        self._open["forward", number] = self._now()

    def _leave(self, number: int, module: nn.Module, args: Any, output: Any) -> None:
        self._close("forward", number)
        tensors = [output] if isinstance(output, Tensor) else output
        for tensor in tensors if isinstance(tensors, (list, tuple)) else ():
            # A hook on the tensor changes nothing in the graph, unlike a module's backward hook.
            if isinstance(tensor, Tensor) and tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(partial(self._reached, number))
                break

    def _reached(self, number: int, grad: Tensor) -> None:
        """Backward reaches the output of a block: its own begins, that of the one before ends."""
        now = self._now()
        self._end_backward(now)
        self._open["backward", number] = now
        self._backward = number

    def _end_backward(self, now: float) -> None:
        if self._backward is not None:
            self._close("backward", self._backward, now)
            self._backward = None

    def _watch(self, module: nn.Module) -> Watch | None:
        number = self._numbers.get(id(module))
        return None if number is None else partial(self._computing, number)

    @contextmanager
    def _computing(self, number: int, phase: Phase) -> Iterator[None]:
        if phase == "forward":  # its hooks see that of a kept block too
            yield
            return
        self._open["recompute", number] = self._now()
        try:
            yield
        finally:
            self._close("recompute", number)

    def _close(self, kind: Kind, number: int, now: float | None = None) -> None:
        start = self._open.pop((kind, number), None)
        if start is not None:
            end = self._now() if now is None else now
            self._spans.append(Span(kind, start, end, number))

    def _now(self) -> float:
        now = self._seconds(time_ns())
        if self._read_bytes is not None:
            self._points.append((now, self._read_bytes()))
        return now

    def _seconds(self, time: int) -> float:
        return (time - self._began) / 1e9

    def _points_of(self, events: Iterable[Event]) -> list[tuple[float, int]]:
        live = 0
        points: dict[float, int] = {}  # of several at one time the last
        for _, num_bytes, time in events:
            live += num_bytes
            points[max(self._seconds(time), 0.0)] = live
        return list(points.items())
