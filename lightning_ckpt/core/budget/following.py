"""The operations and the computations of a step, followed for its record.

Note: [The end of a recompute]
Torch ends a recompute by an exception as soon as backward has what it needs, and the traceback
holds the block's local tensors until it is dropped. So the end is seen when the frame of the region
lets go of its watch, which stands in a local variable there.
"""

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.checkpoint import SAC_IGNORED_OPS

from lightning_ckpt.core._torch import changes_arguments
from lightning_ckpt.core.budget.clock import Clock
from lightning_ckpt.core.budget.inputs import InputWatch
from lightning_ckpt.core.budget.traces import CallTrace
from lightning_ckpt.core.memory.holders import wraps_tensors
from lightning_ckpt.core.memory.mode_stack import StackedMode
from lightning_ckpt.core.recompute import Phase
from lightning_ckpt.core.saving import SAVED

# A recompute detaches what it computes, a forward does not; fake tensors are asked for more. A view
# between two sums does not end their row.
SUM = torch.ops.aten.sum.dim_IntList
IGNORED = frozenset({*SAC_IGNORED_OPS, torch.ops.aten.view.default})
_DEAR = frozenset().union(*SAVED.values())


class Recorder(Protocol):
    """What is told of them.

    Attributes:
        clock: tells times.
        inputs: follows what calls save.
        current: the call that computes now.
    """

    clock: Clock
    inputs: InputWatch
    current: CallTrace | None

    def begin(self, call: int, phase: Phase) -> None:
        """A computation of a call begins."""

    def end(self, call: int) -> None:
        """It has ended."""

    def live_bytes(self) -> int:
        """Bytes that are live now."""

    def cut_if_asked(self) -> None:
        """An operation is about to begin."""

    def see_outside(self, operation: Any, result: Any) -> None:
        """An operation outside of blocks has ended."""


class Watch:
    """Follows one call, from the region that makes it: Note: [The end of a recompute]."""

    def __init__(self, recorder: Recorder, call: int) -> None:
        self._recorder = recorder
        self._call = call

    def inputs(self) -> AbstractContextManager[Any]:
        return self._recorder.inputs.saving(self._call)

    def __call__(self, phase: Phase) -> "_Moment":
        return _Moment(self._recorder, self._call, phase)


class _Moment:
    """One computation of a call."""

    def __init__(self, recorder: Recorder, call: int, phase: Phase) -> None:
        self._recorder = recorder
        self._call = call
        self._phase = phase
        self._has_begun = False

    def __enter__(self) -> None:
        self._has_begun = True
        self._recorder.begin(self._call, self._phase)

    def __exit__(self, *error: Any) -> None:
        if self._phase == "forward":
            self._recorder.end(self._call)

    def __del__(self) -> None:
        if self._has_begun and self._phase == "recompute":
            self._recorder.end(self._call)


class FollowingMode(StackedMode):
    """Looks at the operations inside of blocks. An error in here would end the training step."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if types and any(map(wraps_tensors, types)):
            if self._recorder.current is not None:
                self._recorder.current.meet_wrapped()
            return NotImplemented
        kwargs = kwargs or {}
        if self.on:
            self._recorder.cut_if_asked()
        trace = self._recorder.current
        if not self.on or trace is None or func in IGNORED:
            result = func(*args, **kwargs)
            self._recorder.clock.advance(func, args, kwargs, result)
            self._recorder.see_outside(func, result)
            return result
        if changes_arguments(func):
            trace.spoil([value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)])
        begin = self._recorder.clock.mark() if func in _DEAR else None
        result = func(*args, **kwargs)
        self._recorder.clock.advance(func, args, kwargs, result)
        end = self._recorder.clock.mark() if func in _DEAR else None
        given = (*args, *kwargs.values())
        trace.add(func, given, result, (begin, end), self._recorder.live_bytes())
        return result
