"""The first training step of a fit with a budget, measured."""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_ckpt.core.apply import Handle
from lightning_ckpt.core.clock import Clock
from lightning_ckpt.core.costs import Measurement
from lightning_ckpt.core.measure import StepRecorder
from lightning_ckpt.core.memory import peak_tracker
from lightning_ckpt.core.recompute import watching

Chooser = Callable[["pl.Trainer", "pl.LightningModule", Measurement], None]


class MeasuredStep(Callback):
    """Records the step until the optimizer has moved, with its micro-batches, and hands it over.

    The adapters add it to the trainer's callbacks for one fit.

    Args:
        handle: gives the plan in force, which recomputes every block.
        choose: gets what was measured, between two steps, and may put another plan in force.
    """

    def __init__(self, handle: Callable[[], Handle | None], choose: Chooser) -> None:
        self._handle = handle
        self._choose = choose
        self._recorder: StepRecorder | None = None
        self._watching = ExitStack()
        self._first_step = 0
        self._callbacks: list[Callback] = []
        self.is_done = False

    def attach(self, trainer: "pl.Trainer") -> None:
        """Become one of the trainer's callbacks."""
        self._callbacks = trainer.callbacks  # type: ignore[attr-defined]
        self._callbacks.append(self)

    def detach(self) -> None:
        """Stop, and leave the trainer's callbacks as they were."""
        self.stop()
        if self in self._callbacks:
            self._callbacks.remove(self)

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        handle = self._handle()
        if self.is_done or handle is None:
            return
        if self._recorder is None:
            device = trainer.strategy.root_device
            self._first_step = trainer.global_step
            self._recorder = StepRecorder(
                pl_module, handle.modules, peak_tracker(device, pl_module), Clock(device)
            )
        self._watching.enter_context(watching(self._recorder.watch))
        self._recorder.resume(batch, optimizers=trainer.optimizers)

    @override
    def on_before_zero_grad(self, *args: Any) -> None:
        if self._recorder is not None:
            self._recorder.mark("zero_grad")

    @override
    def on_before_optimizer_step(self, *args: Any) -> None:
        if self._recorder is not None:
            self._recorder.mark("optimizer")

    @override
    def on_train_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._recorder is None:
            return
        self._recorder.pause()
        self._watching.close()
        if trainer.global_step == self._first_step:
            return  # gradients are being accumulated
        handle, recorder = self._handle(), self._recorder
        self.stop()
        if handle is not None:
            names = [block.name for block in handle.plan]
            class_names = [block.class_name for block in handle.plan]
            step = recorder.finish(names, class_names, trainer.optimizers, holds_grads=True)
            self.is_done = True
            self._choose(trainer, pl_module, step)

    def stop(self) -> None:
        """Measure no more; the next step begins anew."""
        self._watching.close()
        if self._recorder is not None:
            self._recorder.stop()
        self._recorder = None
