"""Steps that are no part of the training: whoever measures it looks away meanwhile."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol, runtime_checkable

import lightning.pytorch as pl


@runtime_checkable
class LooksAway(Protocol):
    """A callback that measures the steps of a training."""

    def looking_away(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any
    ) -> AbstractContextManager[None]:
        """Leave out what runs in the context. A step that has begun begins anew after it."""


@contextmanager
def extra_steps(
    trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any
) -> Iterator[None]:
    """Run steps in here that are no part of the training, at the beginning of one that is."""
    with ExitStack() as stack:
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, LooksAway):
                stack.enter_context(callback.looking_away(trainer, pl_module, batch))
        yield
