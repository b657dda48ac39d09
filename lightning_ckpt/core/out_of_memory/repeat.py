"""Run a step again that ran out of memory, as if it had not been run before.

state, sums = StateBefore(model, [batch]), GradientSums(model.parameters())

def step():
    loss = model(batch)
    sums.begin_backward()
    loss.backward()

repeat(step, state, sums, retry)
"""

import gc
import sys
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from lightning_ckpt.core.out_of_memory.sums import CannotRepeat, GradientSums
from lightning_ckpt.core.out_of_memory.undo import StateBefore
from lightning_ckpt.core.plan import Plan

NUM_TRIES = 3  # the last of them recomputes every block

_TIGHTEST = (
    "the plan is at its tightest, every block is recomputed as a whole, after {} repeats; what "
    "else helps: offload=True, a smaller batch"
)
_MEASURED = (
    "the batch was being measured for budget=, with every block recomputed as a whole and nothing "
    "offloaded, so there is no tighter plan to measure it under; what helps: a smaller batch, or "
    "every_n=1 with offload=True instead of the budget, which offloads from the first step on"
)

R = TypeVar("R")


class Retry(NamedTuple):
    """What is done between two tries.

    Attributes:
        is_out_of_memory: whether an error is of that kind; others pass.
        tighter: gives a plan that needs less, None if there is none. Its argument: whether there
            will be no other try.
        follow: puts it in force.
        device: where memory ran out.
        is_measured: whether the step is measured, for plans to come.
    """

    is_out_of_memory: Callable[[Exception], bool]
    tighter: Callable[[bool], Plan | None]
    follow: Callable[[Plan], None]
    device: torch.device
    is_measured: Callable[[], bool] = lambda: False


def repeat(
    run: Callable[[], R], state: StateBefore, sums: GradientSums, retry: Retry
) -> tuple[R, int]:
    """Call `run`, and again after each out-of-memory error that a tighter plan can meet.

    Args:
        run: forward and backward; calls `sums.begin_backward` between them.
        state, sums: taken before.
        retry: what is done between two tries.

    Returns:
        What `run` returned, and how often it was called again.

    Raises:
        Exception: what `run` raised, where it is no such error, or cannot be repeated; then a note
            in it says why.
    """
    oldest = _oldest_node()
    failed: Exception | None = None
    number = 0
    try:
        while True:
            number += 1
            sums.begin_try()
            try:
                result = run()
                sums.check()
                return result, number - 1
            except CannotRepeat as error:
                assert failed is not None
                _add_note(failed, f"the batch could not be repeated: {error}")
                raise failed from None
            except Exception as error:
                if not retry.is_out_of_memory(error):
                    raise
                plan = _next_plan(number, error, state.obstacle() or sums.obstacle(), retry)
                if plan is None:
                    raise
                failed = _without_frames(error)
            # Outside of `except`: the frames of the failed try are gone, and its tensors with them.
            sums.drop()
            state.restore()
            _free(retry.device, oldest)
            retry.follow(plan)
    finally:
        sums.end()


def _next_plan(number: int, error: Exception, obstacle: str | None, retry: Retry) -> Plan | None:
    """The plan for the next try; without one, the error is told why."""
    if obstacle is not None:
        _add_note(error, f"the batch cannot be repeated: {obstacle}")
        return None
    plan = retry.tighter(number >= NUM_TRIES)
    if plan is None:
        _add_note(error, _MEASURED if retry.is_measured() else _TIGHTEST.format(number - 1))
    return plan


def _add_note(error: Exception, note: str) -> None:
    note = f"on_oom='tighten': {note}"
    if sys.version_info >= (3, 11):
        error.add_note(note)
    else:
        error.args = (f"{error}\n{note}",)


def _without_frames(error: Exception) -> Exception:
    """The same error, without the frames that it came through: they hold the activations."""
    met: BaseException | None = error
    while met is not None:
        met.__traceback__ = None
        met = met.__cause__ or met.__context__
    return error


def _oldest_node() -> Tensor:
    """The result of an operation that was done before the step."""
    with torch.enable_grad():
        return torch.zeros((), device="cpu", requires_grad=True) * 1


def _free(device: torch.device, oldest: Tensor) -> None:
    """Let go of what only waits to be collected, and of what the allocator keeps.

    What a failed backward had still to do stays in a queue of its thread, and holds a part of the
    graph, until another backward takes it out and throws it away. Later operations are taken out
    first, so a backward through an earlier one empties the queue. A forward that failed inside of
    `torch.utils.checkpoint` leaves its hooks on saved tensors in force until its generator is
    collected.
    """
    oldest.backward(retain_graph=True)
    torch.clear_autocast_cache()
    gc.collect()
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
