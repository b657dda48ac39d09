"""Callbacks of our own that a trainer has for one fit."""

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback


class Attached(Callback):
    """A callback that the adapters add to a trainer, and take out again."""

    _attached_to: list[Callback] | None = None  # the trainer's list

    def attach(self, trainer: "pl.Trainer") -> None:
        """Become one of the trainer's callbacks."""
        callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks.append(self)
        self._attached_to = callbacks

    def detach(self) -> None:
        """Leave the trainer's callbacks as they were."""
        if self._attached_to is not None and self in self._attached_to:
            self._attached_to.remove(self)
        self._attached_to = None
