"""The memory of training steps on a CPU by torch's own allocation events, compiled code included.

Torch's profiler reports each allocation and each release of its CPU allocator. We run it without
operator events, for one step at a time. Its running total is not used: it drifts, since a release
of what came while nothing was recorded is not reported. So blocks are followed by address, those
that exist when the step begins come from the model, the optimizers and the batch, and of these a
weak reference tells the end.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import time_ns
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ckpt.core._torch import (
    Allocation,
    profiler_in_use,
    start_allocation_events,
    stop_allocation_events,
)
from lightning_ckpt.core.memory.breakdown import Event, Marks, read_events
from lightning_ckpt.core.memory.holders import (
    gradients_of,
    storages_of,
    tensors_by_kind,
    tensors_in,
)
from lightning_ckpt.core.memory.peak import PeakUnavailable
from lightning_ckpt.core.memory.steps import StepSource


class AllocationSteps(StepSource):
    """Bytes that torch's CPU allocator gave out and did not get back yet."""

    name = "allocation events"
    allows_hooks = False  # a hook on a compiled module would have it compiled anew

    def __init__(self) -> None:
        super().__init__()
        self._is_on = False

    def begin(self, model: nn.Module, optimizers: Sequence[Optimizer], batch: Any) -> None:
        self.abandon()
        if profiler_in_use():
            raise PeakUnavailable(
                "torch's profiler is in use, and a second one at a time breaks both; "
                "measure without it"
            )
        self._model, self._optimizers = model, optimizers
        self._step = _Step()
        for kind, tensor in tensors_by_kind(model, optimizers):
            self._step.hold(tensor, kind)
        for tensor in tensors_in(batch):
            self._step.hold(tensor, None)
        start_allocation_events()
        self._is_on = True

    def forward_ended(self) -> None:
        self._step.mark("forward")

    def backward_ended(self) -> None:
        self._step.name(("gradients", g) for g in gradients_of(self._model.parameters()))
        self._step.mark("backward")

    def end(self) -> None:
        self._step.name(tensors_by_kind(self._model, self._optimizers))
        recorded = self._stop_events()
        if recorded is None:
            raise PeakUnavailable(
                "another use of torch's profiler began in the step and took ours off; "
                "measure without it"
            )
        self.events, marks = self._step.replay(recorded)
        self.figures.add(read_events(self.events, marks))

    def abandon(self) -> None:
        self._stop_events()

    def stop(self) -> None:
        self.abandon()

    @property
    def current_bytes(self) -> int:
        return sum(piece.num_bytes for piece in self._step.held.values())

    def _stop_events(self) -> list[Allocation] | None:
        """The step's events, None where there are none to be had."""
        if not self._is_on:
            return None
        self._is_on = False
        return stop_allocation_events()


@dataclass(eq=False)
class _Block:
    """Memory at one address, from its allocation to its release."""

    address: int
    num_bytes: int
    kind: str | None = None


class _Note(NamedTuple):
    """Something that happened beside the allocations."""

    time: int
    action: Callable[["_Replay"], None]


class _Step:
    """What is known of a step beside its allocations."""

    def __init__(self) -> None:
        self.began = time_ns()
        self.held: dict[int, _Block] = {}  # by address
        self._notes: list[_Note] = []
        self._references: list[weakref.ref[torch.UntypedStorage]] = []

    def hold(self, tensor: Tensor, kind: str | None) -> None:
        """There is `tensor` when the step begins."""
        for storage in storages_of(tensor):
            if storage.device.type != "cpu" or storage.data_ptr() in self.held:
                continue
            block = _Block(storage.data_ptr(), storage.nbytes(), kind)
            self.held[block.address] = block
            self._references.append(weakref.ref(storage, self._died(block)))

    def mark(self, what: str) -> None:
        """Forward or backward ended."""
        self._notes.append(_Note(time_ns(), lambda replay: replay.mark(what)))

    def name(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Say of what kind tensors are that came in the step."""
        kinds = {
            storage.data_ptr(): kind for kind, tensor in tensors for storage in storages_of(tensor)
        }
        self._notes.append(_Note(time_ns(), lambda replay: replay.name(kinds)))

    def replay(self, allocations: Sequence[Allocation]) -> tuple[list[Event], Marks]:
        """All that happened, in the order of time."""
        self._references.clear()
        replay = _Replay(self)
        notes = sorted(self._notes, key=lambda note: note.time)
        for allocation in allocations:
            while notes and notes[0].time < allocation.time:
                notes.pop(0).action(replay)
            replay.allocate(allocation)
        for note in notes:
            note.action(replay)
        return replay.events, replay.marks

    def _died(self, block: _Block) -> Callable[[Any], None]:
        def died(_: Any) -> None:
            time = time_ns()
            self._notes.append(_Note(time, lambda replay: replay.release(block, time)))

        return died


class _Replay:
    def __init__(self, step: _Step) -> None:
        self._live = dict(step.held)
        self.events: list[Event] = [(b, b.num_bytes, step.began) for b in self._live.values()]
        self.marks = Marks(len(self.events))

    def allocate(self, allocation: Allocation) -> None:
        """A block came, or went; of one that was never seen the end is none of ours."""
        known = self._live.get(allocation.address)
        if known is not None:
            self.release(known, allocation.time)
        if allocation.num_bytes > 0:
            block = _Block(allocation.address, allocation.num_bytes)
            self._live[block.address] = block
            self.events.append((block, block.num_bytes, allocation.time))

    def release(self, block: _Block, time: int) -> None:
        """`block` went, if it had not gone already."""
        if self._live.get(block.address) is block:
            del self._live[block.address]
            self.events.append((block, -block.num_bytes, time))

    def name(self, kinds: dict[int, str]) -> None:
        for address, kind in kinds.items():
            if (block := self._live.get(address)) is not None:
                block.kind = kind

    def mark(self, what: str) -> None:
        ends = self.marks.forward_ends if what == "forward" else self.marks.backward_ends
        ends.append(len(self.events))
