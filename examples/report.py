"""What a person sees of a run: step times, a progress bar, and the table at the end."""

import logging
import time
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import RichProgressBar
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console
from rich.progress import BarColumn
from rich.table import Table


class StepTime(L.Callback):
    """Log `time/s_per_step`: mean seconds of a training batch, from its arrival to its update.

    Validation and the wait for the next batch are left out. On an accelerator, whose kernels run on
    after the Python call, single steps blur and their mean still holds.
    """

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._seconds = 0.0
        self._num_steps = 0

    def on_train_batch_start(self, *args: Any) -> None:
        self._start = time.perf_counter()

    def on_train_batch_end(self, *args: Any) -> None:
        self._seconds += time.perf_counter() - self._start
        self._num_steps += 1

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        pl_module.log("time/s_per_step", self._seconds / max(self._num_steps, 1))


class ProgressBar(RichProgressBar):
    """Lightning's bar with the losses alone, and short enough for a line of 80 columns."""

    def configure_columns(self, trainer: L.Trainer) -> list[Any]:
        columns = super().configure_columns(trainer)
        for column in columns:
            if isinstance(column, BarColumn):
                column.bar_width = 10
        return columns

    def get_metrics(self, *args: Any) -> dict[str, Any]:
        metrics = super().get_metrics(*args)
        shown = {"loss": "loss", "val/loss": "val"}
        return {short: metrics[key] for key, short in shown.items() if key in metrics}


class EpochTable(Logger):
    """A Lightning logger that keeps what is logged, one row per epoch, and shows it as a table."""

    # Title, logged key, format.
    COLUMNS = (
        ("Train loss", "train/loss", ".3f"),
        ("Val loss", "val/loss", ".3f"),
        ("Peak MiB", "memory/peak_allocated_MiB", ".1f"),
        ("s/step", "time/s_per_step", ".3f"),
    )

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, dict[str, float]] = {}  # epoch -> metrics

    @property
    def name(self) -> str:
        return "table"

    @property
    def version(self) -> str:
        return ""

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        if "epoch" in metrics:
            self.rows.setdefault(int(metrics["epoch"]), {}).update(metrics)

    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any) -> None:
        """Metrics alone are shown."""

    @rank_zero_only
    def show(self, console: Console | None = None) -> None:
        """Print the table."""
        table = Table("Epoch", title="Training", title_justify="left", title_style="bold")
        for title, _, _ in self.COLUMNS:
            table.add_column(title, justify="right")
        for epoch, metrics in self.rows.items():
            cells = (
                format(metrics[key], form) if key in metrics else "-"
                for _, key, form in self.COLUMNS
            )
            table.add_row(str(epoch), *cells)
        (console or Console()).print(table)


@contextmanager
def without_clutter() -> Iterator[None]:
    """Hold back four messages of Lightning that tell nothing about a run, and no others."""
    log = logging.getLogger("lightning.pytorch.utilities.rank_zero")
    log.addFilter(_is_news)
    with warnings.catch_warnings():
        # The data lie in memory: processes that load them would only cost time.
        warnings.filterwarnings("ignore", ".*does not have many workers")
        # Lightning's own use of torch's pytree.
        warnings.filterwarnings("ignore", ".*treespec, LeafSpec.* is deprecated")
        try:
            yield
        finally:
            log.removeFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    message = str(record.msg)
    # An advertisement; and that max_epochs is reached, which lands in the middle of the bar's line.
    return "Tip:" not in message and not message.startswith("`Trainer.fit` stopped")
