"""`PeakMemoryMonitor`: each training epoch's peak memory, as a logged metric."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.utilities import rank_zero_warn
from torchmetrics import MaxMetric
from typing_extensions import override

from lightning_ckpt.core.memory import peak_tracker
from lightning_ckpt.core.peak import PeakTracker, PeakUnavailable

KEY = "memory/peak_allocated_MiB"
_BYTES_PER_MIB = 2**20


class PeakMemoryMonitor(L.Callback):
    """Log the peak of allocated memory of each training epoch as `memory/peak_allocated_MiB`.

    The figure is the largest number of bytes that were allocated at once in any training step of
    the epoch, in MiB, the maximum over all ranks. It goes through the module's `log`, so that each
    logger and the progress bar get it. It covers forward, backward and optimizer step; validation,
    data loading and other callbacks' hooks between the steps are not in it. Parameters, gradients,
    optimizer states and batches are.

    On an accelerator it is what torch's allocator counted. Its peak is reset at each epoch's start
    and after a pause with a higher peak than the steps had: a callback that reads the same counter
    sees these resets. On a CPU it is the bytes of live tensors, followed operation by operation,
    which costs about a tenth of a step at
    a small size (12 blocks of width 256), and more than the step itself on toys.

    `ModelCheckpoint(monitor="memory/peak_allocated_MiB", save_on_train_epoch_end=True)` and
    `EarlyStopping(..., check_on_train_epoch_end=True)` can use it. Put this callback before an
    `EarlyStopping` in `callbacks=[...]`: Lightning moves only checkpoint callbacks to the end.

    There is no figure, and a warning says why, on devices that keep no peak (MPS), and on a CPU
    when something in the module is compiled.

    Example:
        trainer = L.Trainer(callbacks=[PartialCheckpoint(every_n=4), PeakMemoryMonitor()])
    """

    def __init__(self) -> None:
        self._tracker: PeakTracker | None = None
        self._num_steps = 0

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()
        self._try(lambda: self._start(trainer, pl_module))

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._num_steps = 0
        self._with(lambda tracker: tracker.reset_peak(pl_module, trainer.optimizers))

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._with(lambda tracker: tracker.resume(batch))

    @override
    def on_train_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self._num_steps += 1
        self._with(lambda tracker: tracker.pause())

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._with(lambda tracker: tracker.pause())

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        # Every rank takes part, also one without a figure: the others would wait for it.
        peak = _maximum_over_ranks(self._peak_mib(), pl_module.device)
        if peak > 0:
            # Equal on all ranks by now; Lightning warns each user when it is not told to reduce.
            pl_module.log(KEY, peak, prog_bar=True, sync_dist=True, reduce_fx="max")

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._stop()

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        self._stop()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def _start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._tracker = peak_tracker(trainer.strategy.root_device, pl_module)
        self._tracker.reset_peak(pl_module, trainer.optimizers)

    def _peak_mib(self) -> float:
        """This rank's figure, or 0 where there is none."""
        self._with(lambda tracker: tracker.pause())
        if self._tracker is None or self._num_steps == 0:
            return 0.0
        return self._tracker.peak_bytes / _BYTES_PER_MIB

    def _with(self, action: Callable[[PeakTracker], None]) -> None:
        tracker = self._tracker
        if tracker is not None:
            self._try(lambda: action(tracker))

    def _try(self, action: Callable[[], None]) -> None:
        """A figure that cannot be had must not end a training."""
        try:
            action()
        except PeakUnavailable as error:
            self._give_up(str(error))
        except Exception as error:
            self._give_up(f"it could not be read ({type(error).__name__}: {error})")

    def _give_up(self, reason: str) -> None:
        rank_zero_warn(f"`PeakMemoryMonitor` logs no {KEY}: {reason}.")
        self._stop()

    def _stop(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            self._try(tracker.stop)


def _maximum_over_ranks(value: float, device: torch.device) -> torch.Tensor:
    metric = MaxMetric().to(device)
    metric.update(value)
    return metric.compute()
