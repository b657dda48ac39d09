"""One batch of a fit, measured."""

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import lightning.pytorch as pl
from torch.optim import Optimizer

from lightning_ckpt.core.budget.clock import Clock
from lightning_ckpt.core.budget.costs import Measurement
from lightning_ckpt.core.budget.measure import Mark, StepRecorder
from lightning_ckpt.core.budget.sizes import Size
from lightning_ckpt.core.budget.weighing import LinkProbe
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.memory import peak_tracker
from lightning_ckpt.core.offload import OffloadConfig
from lightning_ckpt.core.watchers import watching


class MeasuredBatch:
    """Records from its making to `pause`, and says what was seen when the optimizer has moved.

    Args:
        trainer: whose batch it is.
        module: what is trained.
        handle: the plan in force, which recomputes every block.
        batch: the batch.
        size: of the batch.
        probe: measures the way of an offload afterwards; None: nothing is to be offloaded.
    """

    def __init__(
        self,
        trainer: "pl.Trainer",
        module: "pl.LightningModule",
        handle: Handle,
        batch: Any,
        size: Size,
        probe: LinkProbe | None = None,
    ) -> None:
        self.size = size
        self._probe = probe
        self._names = [block.name for block in handle.plan]
        self._class_names = [block.class_name for block in handle.plan]
        device = trainer.strategy.root_device
        self._clock = Clock(device)
        tracker = peak_tracker(device, module)
        min_bytes = OffloadConfig.min_bytes if probe is None else probe.min_bytes
        self._recorder = StepRecorder(module, handle.modules, tracker, self._clock, min_bytes)
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
        link = None
        if self._probe is not None:
            link = self._probe.link(self._recorder.largest_bytes(), self._clock)
        return self._recorder.finish(
            self._names, self._class_names, optimizers, holds_grads=True, link=link
        )
