"""What is recorded of one single step, or of the moment when memory ran out."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities import rank_zero_warn
from lightning.pytorch.utilities.memory import is_oom_error
from torch import nn

from lightning_ckpt.core.blocks import Block, find_blocks
from lightning_ckpt.core.handle import handles_in_force
from lightning_ckpt.core.memory.breakdown import held_now
from lightning_ckpt.core.memory.cuda_history import CudaHistory
from lightning_ckpt.core.memory.steps import StepSource
from lightning_ckpt.core.memory.timeline import Kind, Timeline, TimelineRecorder
from lightning_ckpt.guarded import Guarded, reason_of
from lightning_ckpt.images import send_picture
from lightning_ckpt.plot import save_picture
from lightning_ckpt.summary import print_held, print_picture


class OneStep:
    """Records the first step that updates with the optimizer's states in place, as the steps after
    it do; where a run ends before that, its last step.

    Args:
        plot: record a timeline.
        snapshot: True records torch's memory snapshot of the step, "oom" that of the end.
    """

    def __init__(self, plot: bool, snapshot: bool | str) -> None:
        self._plot = plot
        self._snapshot = snapshot
        self.timeline: Timeline | None = None
        self._recorder: Guarded[TimelineRecorder] = Guarded("timeline of a step")
        self._history: Guarded[CudaHistory] = Guarded("memory snapshot")

    def start(self, trainer: "pl.Trainer") -> None:
        """Training begins. On every rank: loggers agree on a directory by talking to each other."""
        self.timeline, self._is_done = None, False
        self._rank = trainer.global_rank
        if not (self._plot or self._snapshot):
            self._is_done = True
            return
        self.directory = Path(trainer.log_dir or trainer.default_root_dir)
        device = trainer.strategy.root_device
        if self._snapshot and _has_history(device):
            self._history.start(lambda: CudaHistory(is_on=self._snapshot == "oom"))
        elif self._snapshot is True:
            rank_zero_warn(
                f"`PeakMemoryMonitor(snapshot=True)` does nothing on {device.type}: only CUDA has "
                "torch's memory snapshots"
            )

    def begin(self, trainer: "pl.Trainer", model: nn.Module, source: StepSource) -> None:
        """A step begins."""
        if self._is_done:
            return
        self._updates = trainer.global_step
        self._had_states = any(optimizer.state for optimizer in trainer.optimizers)
        if self._plot:
            self._recorder.start(lambda: _recorder(model, source))
            self.phase("forward")
        if self._snapshot is True:
            self._history.do(lambda history: history.start())

    def phase(self, kind: Kind | None) -> None:
        """A part of the step begins; None: the one before ends."""
        self._recorder.do(lambda recorder: recorder.start_phase(kind))

    def end(self, trainer: "pl.Trainer", source: StepSource) -> None:
        """The step is over."""
        if self._is_done:
            return
        timeline = self._recorder.do(lambda recorder: recorder.finish(source.events))
        self.timeline = timeline or self.timeline
        if self._snapshot is True:
            self._history.do(lambda history: history.save(self._snapshot_path))
            self._history.do(lambda history: history.pause())
        has_updated = trainer.global_step > self._updates
        has_states = any(optimizer.state for optimizer in trainer.optimizers)
        self._is_done = has_updated and (self._had_states or not has_states)

    def abandon(self) -> None:
        """Forget the step that has begun, if one has."""
        self._recorder.stop()
        if self._snapshot is True:
            self._history.do(lambda history: history.pause())

    def out_of_memory(
        self, trainer: "pl.Trainer", model: nn.Module, source: StepSource, error: BaseException
    ) -> None:
        """If `error` is that memory ran out, save the snapshot and print what held the memory."""
        if self._snapshot == "oom" and isinstance(error, Exception) and is_oom_error(error):
            self._history.do(lambda history: history.save(self._snapshot_path))
            held = held_now(model, trainer.optimizers, source.current_bytes)
            print_held(held, self._rank)

    def show(self, trainer: "pl.Trainer", rows: Sequence[Mapping[str, Any]]) -> None:
        """On rank zero: save the picture of the run, and send it to the loggers."""
        if not self._plot or not trainer.is_global_zero:
            return
        path = self.directory / "memory.png"
        try:
            save_picture(path, rows, self.timeline)
            print_picture(path)
            for logger in trainer.loggers:
                send_picture(logger, "memory", path, trainer.global_step)
        except Exception as error:  # a picture must not end a run
            rank_zero_warn(f"`PeakMemoryMonitor` has no picture: {reason_of(error)}.")

    def stop(self) -> None:
        """Leave nothing on."""
        self._recorder.stop()
        self._history.stop()

    @property
    def _snapshot_path(self) -> Path:
        return self.directory / f"memory_snapshot_rank{self._rank}.pickle"


def _has_history(device: torch.device) -> bool:
    return device.type == "cuda"


def _recorder(model: nn.Module, source: StepSource) -> TimelineRecorder:
    return TimelineRecorder(
        _blocks(model) if source.allows_hooks else [],
        None if source.has_events else lambda: source.current_bytes,
    )


def _blocks(model: nn.Module) -> list[Block]:
    """Those that a plan in force names, or those that would be found; there may be none."""
    planned = [
        Block(block.name, module)
        for handle in handles_in_force(model)
        for block, module in zip(handle.plan, handle.modules, strict=True)
    ]
    if planned:
        return planned
    try:
        return find_blocks(model)
    except ValueError:
        return []
