"""One batch of a fit, measured."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_ckpt.core.apply import Handle
from lightning_ckpt.core.clock import Clock
from lightning_ckpt.core.costs import Measurement
from lightning_ckpt.core.measure import Mark, StepRecorder
from lightning_ckpt.core.memory import peak_tracker
from lightning_ckpt.core.sizes import Size
from lightning_ckpt.core.watchers import watching


class MeasuredBatch:
    """Records from its making to `pause`, and says what was seen when the optimizer has moved.

    Args:
        trainer: whose batch it is.
        module: what is trained.
        handle: the plan in force, which recomputes every block.
        batch: the batch.
        size: of the batch.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        module: "pl.LightningModule",
        handle: Handle,
        batch: Any,
        size: Size,
    ) -> None:
        self.size = size
        self._names = [block.name for block in handle.plan]
        self._class_names = [block.class_name for block in handle.plan]
        device = trainer.strategy.root_device
        tracker = peak_tracker(device, module)
        self._recorder = StepRecorder(module, handle.modules, tracker, Clock(device))
        self._watching = ExitStack()
        self._watching.enter_context(watching(self._recorder.watch))
        self._recorder.resume(batch, optimizers=trainer.optimizers)

    def mark(self, mark: Mark) -> None:
        """Say that gradients are let go now, or that the optimizer steps now."""
        self._recorder.mark(mark)

    def pause(self) -> None:
        """The batch is over."""
        self._recorder.pause()
        self.stop()

    def stop(self) -> None:
        """Record no more."""
        self._watching.close()
        self._recorder.stop()

    def finish(self, optimizers: Sequence[Optimizer]) -> Measurement:
        """What was seen, once the optimizers have stepped."""
        return self._recorder.finish(self._names, self._class_names, optimizers, holds_grads=True)
