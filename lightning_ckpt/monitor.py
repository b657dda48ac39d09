"""`PeakMemoryMonitor`: each epoch's peak memory and what it was made of, as logged metrics."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from typing_extensions import override

from lightning_ckpt import epoch_memory as epochs
from lightning_ckpt.core.memory import step_source
from lightning_ckpt.core.memory.resident import ResidentSet
from lightning_ckpt.core.memory.steps import StepSource
from lightning_ckpt.epoch_memory import MeasuredEpoch
from lightning_ckpt.guarded import Guarded
from lightning_ckpt.monitor_settings import MonitorSettings
from lightning_ckpt.one_step import OneStep
from lightning_ckpt.summary import print_epochs

KEY = epochs.KEY
VAL_KEY = "memory/val_peak_allocated_MiB"


class PeakMemoryMonitor(L.Callback):
    """Log the peak of allocated memory of each training epoch, and what it was made of.

        trainer = L.Trainer(callbacks=[PartialCheckpoint(every_n=4), PeakMemoryMonitor()])

    Everything goes through the module's `log`, so that each logger, the progress bar, and
    `ModelCheckpoint(monitor=..., save_on_train_epoch_end=True)` and `EarlyStopping(...,
    check_on_train_epoch_end=True)` have it. (Put this callback before an `EarlyStopping` in
    `callbacks=[...]`: Lightning moves only checkpoint callbacks to the end.)

    `memory/peak_allocated_MiB` is the largest number of bytes that were allocated at once in any
    training step of the epoch: forward, backward and optimizer step, with parameters, gradients,
    optimizer states and the batch. Validation, data loading and other callbacks' hooks between the
    steps are not in it; validation has `memory/val_peak_allocated_MiB`. On an accelerator it is
    what torch's allocator counted, on a CPU the bytes of live tensors. All keys, what each source
    sees and misses, and what it costs: `docs/monitor.md`.

    With several ranks a figure is that of the rank with the highest peak, and `summary()` says
    which one that was. What cannot be read is not logged, a warning says why, and training goes on.

    Args:
        breakdown: log parameters, gradients, optimizer states, buffers, activations and the rest
            at the peak too.
        plot: save `memory.png` at the end of fit, in the trainer's `log_dir` or
            `default_root_dir`, and send it to loggers that take images. Needs matplotlib.
        every_n_epochs: measure epochs 0, n, 2n, ...; the others have no figure.
        first_steps: on a CPU, follow this many steps of an epoch and no more, to save time (at
            least one with the optimizer's states in place): a larger batch that comes later is
            missed. None: every step.
        snapshot: on CUDA, True saves torch's own memory snapshot of one step, "oom" of the moment
            when an out-of-memory error ends the run; open it at https://pytorch.org/memory_viz.
            "oom" also prints what held the memory then, on every device.
        table: print a table of the epochs at the end of fit, on rank zero.

    Raises:
        TypeError, ValueError: an argument is impossible.
        ModuleNotFoundError: `plot=True` without matplotlib.
    """

    def __init__(
        self,
        *,
        breakdown: bool = True,
        plot: bool = False,
        every_n_epochs: int = 1,
        first_steps: int | None = 16,
        snapshot: bool | str = False,
        table: bool = True,
    ) -> None:
        self.settings = MonitorSettings(
            breakdown, plot, every_n_epochs, first_steps, snapshot, table
        )
        self._steps: Guarded[StepSource] = Guarded(KEY)
        self._val_steps: Guarded[StepSource] = Guarded(VAL_KEY)
        self._host: Guarded[ResidentSet] = Guarded("memory/peak_host_MiB")
        self._one_step = OneStep(plot, snapshot)
        self._source = "none"
        self._rows: list[dict[str, Any]] = []
        self._epoch: MeasuredEpoch  # from the start of training on

    @property
    def source(self) -> str:
        """Where the figures come from: "live tensors", "allocation events" or "allocator";
        "resident set" where only `memory/peak_host_MiB` can be had; "none" before fit."""
        return self._source

    def summary(self) -> list[dict[str, Any]]:
        """A row for each measured epoch of the last fit, as plain data: the logged figures in MiB,
        the parts at the peak, the rank with the highest peak, the source, the plans in force,
        and the median seconds of a step."""
        return [dict(row) for row in self._rows]

    @override
    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        modules = [pl_module, epochs.model_of(trainer, pl_module)]
        self._steps.start(lambda: step_source(trainer.strategy.root_device, *modules))
        if self._steps:
            self._val_steps.start(lambda: step_source(trainer.strategy.root_device, *modules))
        self._host.start(ResidentSet)
        self._one_step.start(trainer)
        self._rows = []
        self._name_source()
        self._begin_epoch(trainer)  # a resumed epoch has no start

    @override
    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._begin_epoch(trainer)

    @override
    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self._begin_step(trainer, pl_module, batch)

    @contextmanager
    def looking_away(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any
    ) -> Iterator[None]:
        """Leave out what runs in here, between two steps or at the beginning of one (see
        `extra_steps.py`)."""
        has_begun = self._epoch.is_in_step
        self._steps.do(lambda source: source.abandon())
        self._one_step.abandon()
        self._host.do(lambda host: host.pause())
        yield
        self._host.do(lambda host: host.resume())
        if has_begun:
            self._begin_step(trainer, pl_module, batch)

    @override
    def on_before_backward(
        self, trainer: L.Trainer, pl_module: L.LightningModule, loss: Tensor
    ) -> None:
        if self._epoch.follows:
            self._steps.do(lambda source: source.forward_ended())
            self._one_step.phase("backward")

    @override
    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._epoch.follows:
            self._steps.do(lambda source: source.backward_ended())
            self._one_step.phase(None)

    @override
    def on_before_optimizer_step(
        self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any
    ) -> None:
        if self._epoch.follows:
            self._one_step.phase("optimizer")

    @override
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if self._epoch.follows:
            self._steps.do(lambda source: source.end())
            self._steps.do(lambda source: self._one_step.end(trainer, source))
        self._host.do(lambda host: host.look())
        self._epoch.end_step(pl_module)

    @override
    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._host.do(lambda host: host.pause())
        self._val_steps.do(lambda source: source.reset())

    @override
    def on_validation_batch_start(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._measures_validation(trainer, batch_idx):
            model = epochs.model_of(trainer, pl_module)
            self._val_steps.do(lambda source: source.begin(model, trainer.optimizers, batch))

    @override
    def on_validation_batch_end(
        self,
        trainer: L.Trainer,
        pl_module: L.LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        if self._measures_validation(trainer, batch_idx):
            self._val_steps.do(lambda source: source.end())

    @override
    def on_validation_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._measures_validation(trainer):
            figures = self._val_steps.do(lambda source: source.figures)
            own = {epochs.PEAK: figures.peak if figures and figures.num_steps else None}
            epochs.log(pl_module, epochs.logged(epochs.over_ranks(trainer, own)[0], "val_"))

    @override
    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._host.do(lambda host: host.resume())

    @override
    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._steps.do(lambda source: source.abandon())  # Lightning may skip a batch that has begun
        if not self._epoch.is_measured:
            return
        own = epochs.own_figures(
            self._steps.do(lambda source: source.figures),
            self._host.do(lambda host: host.peak_bytes) if self._epoch.seconds else None,
            self._epoch.offloaded,
            self.settings.breakdown,
        )
        # Every rank takes part, also one without a figure: the others would wait for it.
        figures, rank = epochs.over_ranks(trainer, own)
        epochs.log(pl_module, epochs.logged(figures))
        self._name_source()
        self._rows.append(epochs.epoch_row(figures, self._epoch, rank, self.source, pl_module))

    @override
    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._is_first_of_its_kind(trainer):
            if self.settings.table and self._rows:
                rank_zero_only(print_epochs)(self._rows)
            self._one_step.show(trainer, self._rows)
        self._stop()

    @override
    def on_exception(
        self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException
    ) -> None:
        model = epochs.model_of(trainer, pl_module)
        self._steps.do(
            lambda source: self._one_step.out_of_memory(trainer, model, source, exception)
        )
        self._stop()

    @override
    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        self._stop()

    def _begin_epoch(self, trainer: L.Trainer) -> None:
        is_measured = trainer.current_epoch % self.settings.every_n_epochs == 0
        self._epoch = MeasuredEpoch(trainer, is_measured, self.settings.first_steps)
        self._steps.do(lambda source: source.reset())
        self._host.do(lambda host: host.reset_peak())
        self._host.do(lambda host: host.resume())

    def _begin_step(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any) -> None:
        if self._epoch.begin_step(trainer, pl_module):
            model = epochs.model_of(trainer, pl_module)
            self._steps.do(lambda source: self._one_step.begin(trainer, model, source))
            self._steps.do(lambda source: source.begin(model, trainer.optimizers, batch))

    def _measures_validation(self, trainer: L.Trainer, batch_idx: int = 0) -> bool:
        # Before training, in the sanity check, there is no epoch yet.
        is_fit = trainer.state.fn == TrainerFn.FITTING and not trainer.sanity_checking
        return is_fit and self._epoch.measures_validation(batch_idx)

    def _is_first_of_its_kind(self, trainer: L.Trainer) -> bool:
        """A second monitor with the same settings has the same to show."""
        others = (c for c in trainer.callbacks if isinstance(c, PeakMemoryMonitor))  # type: ignore[attr-defined]
        return next(c for c in others if c.settings == self.settings) is self

    def _name_source(self) -> None:
        only_host = "resident set" if self._host else "none"
        self._source = self._steps.do(lambda source: source.name) or only_host

    def _stop(self) -> None:
        for instrument in (self._steps, self._val_steps, self._host):
            instrument.stop()
        self._one_step.stop()
