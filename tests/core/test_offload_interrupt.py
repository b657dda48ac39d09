"""Ctrl-C ends the step, wherever it comes, and the next step is what it would have been."""

import ast
import copy
import itertools
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from helpers import MlpBlock, Stack, assert_same
from torch import Tensor, nn

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core import offload
from lightning_ckpt.core.offload import OffloadConfig

ENGINE = str(Path(offload.__file__).parent)


def step(model: nn.Module) -> list[Tensor]:
    model.zero_grad()
    model(torch.linspace(-1, 1, 24).view(3, 8)).pow(2).mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


class Interrupt:
    """Raises a KeyboardInterrupt, as Ctrl-C would, at one of the lines that this thread runs in
    code that `watches`."""

    def __init__(self, number: int, watches: Callable[[FrameType], bool]) -> None:
        self.number = number
        self.watches = watches
        self.num_lines = 0
        self.where = "nowhere"

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not self.watches(frame):
            return None
        if event == "line" and not _is_with(frame):
            self.num_lines += 1
            if self.num_lines == self.number:
                self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def _is_with(frame: FrameType) -> bool:
    """Between the end of a `with` and the release of its lock Python handles no signal, but calls
    a trace function."""
    return frame.f_lineno in _with_lines(frame.f_code.co_filename)


@cache
def _with_lines(file: str) -> set[int]:
    nodes = ast.walk(ast.parse(Path(file).read_text()))
    withs = [node for node in nodes if isinstance(node, ast.With)]
    return {line for node in withs for line in range(node.lineno, node.body[0].lineno)}


def is_engine(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(ENGINE)


@contextmanager
def interrupted(
    number: int, watches: Callable[[FrameType], bool] = is_engine
) -> Iterator[Interrupt]:
    at = Interrupt(number, watches)
    before = sys.gettrace()
    sys.settrace(at)
    try:
        yield at
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("scope", ["inputs", "kept"])
def test_at_each_line_of_the_engine(
    scope: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt that Python drops goes to `sys.unraisablehook`: one of a destructor, or of what
    a weak reference calls back."""
    dropped: list[str] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda args: dropped.append(repr(args.exc_value)))
    model = Stack(lambda: MlpBlock(dropout=0.0), 2)
    plain = step(copy.deepcopy(model))
    every_n = 1 if scope == "inputs" else 2
    config = OffloadConfig("disk", scope, str(tmp_path), min_bytes=0, keep_last=0, prefetch=1)
    with apply_partial_checkpoint(model, every_n, offload=config) as handle:
        step(model)
        numbers = itertools.count(1, 3)  # each third line, since it takes a while
        num_interrupted, is_over = 0, False
        while not is_over:
            with interrupted(next(numbers)) as at:
                try:
                    step(model)
                    is_over = True
                except KeyboardInterrupt:
                    num_interrupted += 1
            assert dropped == [], at.where
            assert_same(step(model), plain)
        assert num_interrupted > 100, "it was not in the engine"
        assert handle.offloader is not None
        handle.offloader.settle()
        step(model)
        assert len(handle.offloader._scheduler._leaving) <= 3
    assert list(tmp_path.iterdir()) == []
    assert threading.active_count() < 20
