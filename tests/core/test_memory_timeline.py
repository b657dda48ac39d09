"""One step over time: which phases and which blocks, in which order, and how many bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import apply_partial_checkpoint, find_blocks
from lightning_ckpt.core.memory.steps import LiveSteps
from lightning_ckpt.core.memory.timeline import Span, Timeline, TimelineRecorder
from lightning_ckpt.core.watchers import Phase, watching


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> tuple[Tensor, str]:
        return self.layer(x).sin(), "not a tensor"


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


def record(model: nn.Module, with_events: bool = True) -> tuple[Timeline, LiveSteps]:
    source = LiveSteps()
    blocks = find_blocks(model, "blocks.*")
    recorder = TimelineRecorder(blocks, None if with_events else lambda: source.current_bytes)
    recorder.start_phase("forward")
    source.begin(model, [], torch.ones(8, 64))
    loss = model(torch.ones(8, 64)).sum()
    source.forward_ended()
    recorder.start_phase("backward")
    loss.backward()
    source.backward_ended()
    recorder.start_phase(None)
    recorder.start_phase("optimizer")
    source.end()
    timeline = recorder.finish(source.events if with_events else ())
    source.stop()
    return timeline, source


def of_kind(timeline: Timeline, kind: str) -> list[Span]:
    return [span for span in timeline.blocks if span.kind == kind]


def test_phases_and_blocks_in_order() -> None:
    model = Stack()
    with apply_partial_checkpoint(model, every_n=2, layers="blocks.*"):
        timeline, source = record(model)
    assert [span.kind for span in timeline.phases] == ["forward", "backward", "optimizer"]
    assert timeline.block_names == tuple(f"blocks.{i}" for i in range(4))
    assert [span.block for span in of_kind(timeline, "forward")] == [0, 1, 2, 3]
    backward = of_kind(timeline, "backward")
    assert [span.block for span in backward] == [3, 2, 1, 0]
    recomputes = of_kind(timeline, "recompute")
    assert [span.block for span in recomputes] == [2, 0]
    forward, backward_phase, _ = timeline.phases
    for span in of_kind(timeline, "forward"):
        assert forward.start <= span.start <= span.end <= forward.end
    for recompute in recomputes:
        own = next(span for span in backward if span.block == recompute.block)
        assert own.start <= recompute.start < recompute.end <= own.end
    for first, second in pairwise(backward):
        assert first.end == second.start
    assert backward[-1].end == backward_phase.end
    assert max(live for _, live in timeline.points) == source.figures.peak


def test_no_hook_stays() -> None:
    model = Stack()
    record(model)
    for block in model.blocks:
        assert not block._forward_hooks
        assert not block._forward_pre_hooks
    from lightning_ckpt.core import watchers

    assert watchers._watchers == []


def test_without_events_bytes_are_read_at_the_marks() -> None:
    timeline, source = record(Stack(), with_events=False)
    marks = {time for time, _ in timeline.points}
    assert {span.start for span in timeline.blocks} <= marks
    assert 0 < max(live for _, live in timeline.points) <= source.figures.peak


def test_gradients_are_those_of_a_step_without() -> None:
    gradients = []
    for recorded in (True, False):
        torch.manual_seed(0)
        model = Stack()
        if recorded:
            record(model)
        else:
            model(torch.ones(8, 64)).sum().backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_computations_are_watched_and_end_with_torchs_early_stop() -> None:
    """By all who watch when the block is called; what is called later, by those alone who stay."""
    model = Stack()
    told: list[tuple[str, int, str]] = []
    numbers = {id(block): number for number, block in enumerate(model.blocks)}

    def watcher(name: str) -> Any:
        @contextmanager
        def watch(block: nn.Module, phase: Phase) -> Iterator[None]:
            try:
                yield
            finally:
                told.append((name, numbers[id(block)], phase))

        return lambda block: partial(watch, block)

    with apply_partial_checkpoint(model, every_n=2, layers="blocks.*"):
        with watching(watcher("a")), watching(watcher("b")), watching(lambda block: None):
            loss = model(torch.ones(8, 64)).sum()
        assert told == [(name, n, "forward") for n in (0, 2) for name in "ba"]
        told.clear()
        loss.backward(retain_graph=True)
        assert told == [(name, n, "recompute") for n in (2, 0) for name in "ba"]
        told.clear()
        model(torch.ones(8, 64)).sum().backward()  # nobody watches
    assert told == []


def test_eval_and_no_grad_make_no_hook_on_outputs() -> None:
    model = Stack()
    recorder = TimelineRecorder(find_blocks(model, "blocks.*"))
    recorder.start_phase("forward")
    with torch.no_grad():
        model(torch.ones(8, 64))
    timeline = recorder.finish()
    assert [span.kind for span in timeline.blocks] == ["forward"] * 4


def test_block_that_raises_ends_its_span() -> None:
    class Fails(Block):
        def forward(self, x: Tensor) -> tuple[Tensor, str]:
            raise ZeroDivisionError

    model = Stack()
    model.blocks[1] = Fails()
    recorder = TimelineRecorder(find_blocks(model, "blocks.*"))
    recorder.start_phase("forward")
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(8, 64))
    assert [span.block for span in recorder.finish().blocks] == [0, 1]
