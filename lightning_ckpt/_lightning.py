"""Every private Lightning name that we touch, and why. Each has a test that fails when it moves."""

from collections.abc import Callable
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import lightning.pytorch as pl
from lightning.pytorch.strategies import Strategy


def checkpoints_by_itself(strategy: Strategy) -> bool:
    """Whether `strategy` was given `activation_checkpointing_policy` (only FSDP has it).

    The strategy keeps what it will pass to `apply_activation_checkpointing` and offers no public
    way to ask.
    """
    return bool(getattr(strategy, "_activation_checkpointing_kwargs", None))


class Closure(NamedTuple):
    """The forward and backward of one batch in automatic optimization.

    Attributes:
        batch_idx: which batch of the epoch.
        run: does it, once.
        given: what it may change beside the model: the batch, what `self.log` collected, progress.
    """

    batch_idx: int
    run: Callable[..., Any]
    given: tuple[Any, ...]


def around_closures(
    trainer: "pl.Trainer",
    around: Callable[..., Any],
    before_backward: Callable[[], None],
) -> Callable[[], None]:
    """Let `around(closure, *args, **kwargs)` stand in for each closure, and `before_backward` be
    called when gradients have been zeroed, if they are to be, and before they flow.

    The optimizer calls the closure, or the loop itself while gradients are accumulated; the one
    place before both is where the loop makes it. No hook stands around it.

    Returns:
        Undoes it.
    """
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    make = loop._make_closure

    def make_closure(kwargs: Any, optimizer: Any, batch_idx: int) -> Any:
        inner = make(kwargs, optimizer, batch_idx)
        if inner._backward_fn is not None:
            inner._backward_fn = partial(_preceded, before_backward, inner._backward_fn)
        given = (kwargs, trainer.fit_loop.epoch_loop._results, loop.optim_progress)
        outer = copy(inner)  # so that neither holds itself, and with it the batch
        outer.closure = partial(around, Closure(batch_idx, inner.closure, given))
        return outer

    loop._make_closure = make_closure

    def undo() -> None:
        if vars(loop).get("_make_closure") is make_closure:
            del loop._make_closure

    return undo


def _preceded(first: Callable[[], None], then: Callable[..., Any], *args: Any) -> Any:
    first()
    return then(*args)
