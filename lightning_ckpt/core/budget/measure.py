"""Measure one training step in which every block is recomputed.

The recompute of a block shows what a forward alone does not: the bytes of its activations, and how
long they take to compute, at no extra forward. A dispatch mode follows the operations inside the
blocks, to know what the dear ones among them give and take; peaks come from `peak_tracker`.

Note: [What autograd holds longer]
A node's saved tensors are let go after the gradients of what it broadcast (a bias) were summed up;
those that a recompute gave are let go before. So a kept block may need those sums on top.
"""

import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_ckpt.core.budget.clock import Clock
from lightning_ckpt.core.budget.costs import Call, Kind, Measurement, Segment
from lightning_ckpt.core.budget.following import IGNORED, SUM, FollowingMode, Watch
from lightning_ckpt.core.budget.inputs import InputWatch
from lightning_ckpt.core.budget.merging import pooled
from lightning_ckpt.core.budget.saved_results import is_plain
from lightning_ckpt.core.budget.traces import CallTrace
from lightning_ckpt.core.budget.waiting import Link, offloaded, windows, within_room
from lightning_ckpt.core.memory.peak import PeakTracker
from lightning_ckpt.core.offload.config import OffloadConfig
from lightning_ckpt.core.recompute import Phase

_NO_WAITING = Link(float("inf"), float("inf"))
Mark = Literal["zero_grad", "optimizer"]
UNNAMED = "tensors that no module has (DDP's gradient buckets)"  # one of a measurement's terms


class _Raw(NamedTuple):
    """A stretch of the step as it was seen."""

    kind: Kind
    call: int | None
    start: int
    peak: int
    grad_bytes: int
    sum_bytes: int
    met_bytes: int  # until its end


class StepRecorder:
    """Records a step: `resume()`, the step, `pause()`; the same again for more micro-batches; then
    `finish()`. Its `watch` is for `recompute.watching`.

    Args:
        root: the model.
        blocks: its blocks, in the plan's order.
        tracker: tells live bytes and peaks.
        clock: tells times.
        min_bytes: smaller storages would not be offloaded.
    """

    def __init__(
        self,
        root: nn.Module,
        blocks: Sequence[nn.Module],
        tracker: PeakTracker,
        clock: Clock,
        min_bytes: int = OffloadConfig.min_bytes,
    ) -> None:
        self._root = root
        self._index = {id(block): index for index, block in enumerate(blocks)}
        self._tracker = tracker
        self.clock = clock
        self._mode = FollowingMode(self)
        self.inputs = InputWatch(root, clock.device, min_bytes)
        self.calls: list[CallTrace] = []
        self.current: CallTrace | None = None  # the call that computes now
        self._raw: list[_Raw] = []
        self._marks: dict[Mark, int] = {}
        self._kind: Kind = "outside"
        self._call: int | None = None
        self._start = 0
        self._sums = self._most_sums = 0  # bytes, of those in a row
        self._is_cut_soon = False
        self._times: list[tuple[Any, Any]] = []
        self._resumed: Any = None
        self._state_bytes: int | None = None
        self._met_before = 0  # the stretch that lasts
        tracker.backdate()

    def resume(self, *holders: Any, optimizers: Sequence[Optimizer] = ()) -> None:
        """Record from here on, with the tensors in `holders` counted in."""
        self._tracker.resume(self._root, list(optimizers), *holders)
        if self._state_bytes is None:
            self._state_bytes = state_bytes(optimizers, self.clock.device)
        self._tracker.reset_peak()
        self._kind, self._call, self._start = "outside", None, self._tracker.current_bytes
        self._met_before = self._tracker.met_bytes
        self.inputs.begin()
        self._mode.enter()
        self._resumed = self.clock.mark()

    def pause(self) -> None:
        """Leave what comes out of the record."""
        if self._resumed is not None:
            self._times.append((self._resumed, self.clock.mark()))
            self._resumed = None
            self._cut("outside")
        self._mode.leave()
        self._tracker.pause()

    def stop(self) -> None:
        """Let go of everything."""
        self._mode.leave()
        self._tracker.stop()
        self.current = None

    def mark(self, mark: Mark) -> None:
        """Say that gradients are let go now, or that the optimizer steps now."""
        if self._resumed is not None:
            self._cut("outside")
            self._marks.setdefault(mark, len(self._raw))

    def watch(self, block: nn.Module) -> Watch | None:
        """What follows the computations of one call of `block`."""
        index = self._index.get(id(block))
        if index is None or self._resumed is None:
            return None
        self.calls.append(CallTrace(index, self.clock, self, len(self.calls), self.inputs))
        return Watch(self, len(self.calls) - 1)

    def begin(self, call: int, phase: Phase) -> None:
        if self._resumed is None:
            return
        self._cut(phase, call)
        if phase == "recompute":
            self.inputs.settle(call)
        self.current = self.calls[call]
        self.current.begin(phase, self._start)

    def end(self, call: int) -> None:
        if self.current is self.calls[call]:
            self.current.end(self._tracker.current_bytes)
            self.current = None
            self._cut("outside")

    def live_bytes(self) -> int:
        return self._tracker.current_bytes

    def index(self) -> int:
        return len(self._raw)

    def cut_soon(self) -> int:
        # Not now: who follows live bytes may hear of the death only after us.
        self._is_cut_soon = True
        return len(self._raw) + 1

    def cut_if_asked(self) -> None:
        if self._is_cut_soon and self._kind == "outside":
            self._cut("outside")

    def see_outside(self, operation: Any, result: Any) -> None:
        """Note: [What autograd holds longer]."""
        if operation is SUM:
            self._sums += result.nbytes
            self._most_sums = max(self._most_sums, self._sums)
        elif operation not in IGNORED:
            self._sums = 0

    def _cut(self, kind: Kind, call: int | None = None) -> None:
        """End the stretch that lasts, and begin another."""
        now, met = self._tracker.current_bytes, self._tracker.met_bytes
        start = self._start + met - self._met_before
        peak = max(self._tracker.peak_bytes, start, now)
        self._raw.append(
            _Raw(self._kind, self._call, start, peak, self._grad_bytes(), self._most_sums, met)
        )
        self._tracker.reset_peak()
        self._sums = self._most_sums = 0
        self._is_cut_soon = False
        self._kind, self._call, self._start, self._met_before = kind, call, now, met
        self.inputs.look(len(self._raw))

    def _grad_bytes(self) -> int:
        grads = [p.grad for p in self._root.parameters() if p.grad is not None]
        return _bytes_of(grads, self.clock.device)

    def finish(
        self,
        names: Sequence[str],
        class_names: Sequence[str],
        optimizers: Sequence[Optimizer] = (),
        *,
        holds_grads: bool = False,
        link: Link | None = None,
    ) -> Measurement:
        """What was recorded, as it is in a step that finds the optimizer's states there.

        Args:
            names, class_names: of the blocks.
            optimizers: those that stepped.
            holds_grads: whether the forward of a later step still holds the gradients of the step
                before, until the mark "zero_grad" or, without one, until backward.
            link: the way to where offloaded tensors would wait; None: nobody would wait for it.
        """
        link = link or _NO_WAITING
        self.clock.synchronize()
        device = self.clock.device
        states = max(0, state_bytes(optimizers, device) - (self._state_bytes or 0))
        grads = max((raw.grad_bytes for raw in self._raw), default=0)
        stepped = self._marks.get("optimizer", len(self._raw))
        kinds = [raw.kind for raw in self._raw]
        backward = kinds.index("recompute") if "recompute" in kinds else 0
        zeroed = self._marks.get("zero_grad", backward) if holds_grads else 0
        met = self._tracker.met_bytes
        segments = []
        for index, raw in enumerate(self._raw):
            more = states if index < stepped else 0
            more += grads - raw.grad_bytes if index < zeroed else 0
            more += met - raw.met_bytes
            peak = raw.peak + more + (raw.sum_bytes if index > backward else 0)
            segments.append(Segment(raw.kind, raw.call, raw.start + more, peak))
        step = Measurement(
            tuple(names),
            tuple(class_names),
            within_room(list(self._calls(link)), self._num_waves(), link.room_bytes),
            tuple(segments),
            sum(self.clock.seconds(begin, end) for begin, end in self._times),
            {
                "parameters and buffers": _bytes_of(
                    [*self._root.parameters(), *self._root.buffers()], device
                ),
                "gradients": grads,
                "optimizer states": states + (self._state_bytes or 0),
                UNNAMED: met,
            },
        )
        return pooled(step)

    def _calls(self, link: Link) -> Iterator[Call]:
        """What can be done with each."""
        known = windows((raw.kind, raw.call) for raw in self._raw)
        sizes = [size for trace in self.calls for size in trace.made_sizes()]
        overhead = self.clock.overhead(statistics.mean(sizes or [0]))
        for index, trace in enumerate(self.calls):
            options, window = trace.options(overhead), known.get(index)
            movable = trace.movable(window.returns) if window else None
            if window is None or movable is None:
                yield Call(trace.block, options)
                continue
            meanwhile = self.calls[window.before].times()[1], trace.times()[0]
            in_window = max(0.0, self.clock.seconds(*meanwhile))
            options |= offloaded(options, movable, link, in_window)
            gone, producers = movable.inputs.gone, movable.inputs.producers
            yield Call(trace.block, options, window.leaves, gone, window.returns, producers)

    def _num_waves(self) -> int:
        kinds = [raw.kind for raw in self._raw if raw.kind != "outside"]
        return sum(pair == ("forward", "recompute") for pair in pairwise(kinds))

    def largest_bytes(self) -> int:
        """The most that one call would offload if it were recomputed."""
        saved = [self.inputs.saved(index, len(self._raw)) for index in range(len(self.calls))]
        return max((each.alone_bytes for each in saved), default=0)


def state_bytes(optimizers: Sequence[Optimizer], device: torch.device) -> int:
    """Bytes of the states that optimizers have by now."""
    states = [state for optimizer in optimizers for state in optimizer.state.values()]
    values = [value for state in states if isinstance(state, dict) for value in state.values()]
    return _bytes_of([value for value in values if isinstance(value, Tensor)], device)


def _bytes_of(tensors: Iterable[Tensor], device: torch.device) -> int:
    """Bytes of the storages behind `tensors` on `device`, each counted once."""
    local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
    plain = (t for t in local if is_plain(t) and t.device.type == device.type)
    storages = {id(s): s for s in (tensor.untyped_storage() for tensor in plain)}
    return sum(storage.nbytes() for storage in storages.values())
