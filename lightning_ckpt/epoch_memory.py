"""One epoch's figures: of this rank in bytes, of all ranks, and in MiB under the logged keys."""

import statistics
import time
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import lightning.pytorch as pl
from torch import nn

from lightning_ckpt.core.handle import Handle, handles_in_force
from lightning_ckpt.core.memory.breakdown import KINDS, PARTS
from lightning_ckpt.core.memory.steps import EpochFigures
from lightning_ckpt.ranks import gathered

PEAK = "peak_allocated"
KEY = f"memory/{PEAK}_MiB"
PLAIN = "plain"  # no plan is in force
_PEAKS = ("peak_reserved", "peak_host", "offloaded")  # each the maximum over ranks, on its own
_AT_PEAK = tuple(f"{part}_at_peak" for part in PARTS)
_FIGURES = (PEAK, *KINDS, "activations", "other", *_PEAKS, *_AT_PEAK)
_BYTES_PER_MIB = 2**20

Bytes = Mapping[str, int | None]


class _PlanWords(NamedTuple):
    """What is said of a plan."""

    num_recomputed: int
    num_blocks: int
    offload: str


class MeasuredEpoch:
    """The steps of an epoch: which are followed, how long they took, what they moved out.

    Args:
        trainer: at the epoch's start.
        is_measured: whether the epoch gets figures.
        first_steps: how many steps are followed on a CPU, None: all.
    """

    def __init__(self, trainer: "pl.Trainer", is_measured: bool, first_steps: int | None) -> None:
        on_cpu = trainer.strategy.root_device.type == "cpu"
        self._first_steps = first_steps if on_cpu else None
        self.number = trainer.current_epoch
        self.is_measured = is_measured
        self.is_in_step = False
        self.follows = False  # the step that runs
        self.seconds: list[float] = []
        self.offloaded = 0
        self._handles: list[Handle] | None = None
        self._plans: dict[int, set[_PlanWords]] = {}  # that steps had, by the handle's place
        self._updates_before = trainer.global_step
        # An optimizer makes its states in its first step: the figure is true from the second on.
        has_states = any(optimizer.state for optimizer in trainer.optimizers)
        self._updates_needed = 1 if has_states else 2

    def begin_step(self, trainer: "pl.Trainer", module: nn.Module) -> bool:
        """Whether the step that begins is followed."""
        self.is_in_step = True
        self._moved_before = self._moved(module)
        updates = trainer.global_step - self._updates_before
        self.follows = self.is_measured and (
            self._first_steps is None
            or len(self.seconds) < self._first_steps
            or updates < self._updates_needed
        )
        self._start = time.perf_counter()
        return self.follows

    def end_step(self, module: nn.Module) -> None:
        """The step is over."""
        self.is_in_step = self.follows = False
        self.seconds.append(time.perf_counter() - self._start)
        self._note_plans(module)
        self.offloaded = max(self.offloaded, self._moved(module) - self._moved_before)

    def _note_plans(self, module: nn.Module) -> None:
        """Those of the step that ends: a budget puts what it learned from it in force after us."""
        # By now every callback has made its plan; who tightens one may have made it anew.
        if self._handles is None or not all(handle.modules for handle in self._handles):
            self._handles = handles_in_force(module)
        for place, handle in enumerate(self._handles):
            plan = handle.plan
            words = _PlanWords(plan.num_recomputed, len(plan), plan.offload or "")
            self._plans.setdefault(place, set()).add(words)

    def plans(self, module: nn.Module) -> str:
        """What its steps did to the blocks of `module`, in a few words."""
        if not self.seconds:
            self._note_plans(module)
        return "; ".join(map(_words, self._plans.values())) or PLAIN

    def measures_validation(self, batch_idx: int) -> bool:
        """Whether this batch of the epoch's validation is followed."""
        is_early = self._first_steps is None or batch_idx < self._first_steps
        return self.is_measured and is_early

    def _moved(self, module: nn.Module) -> int:
        """Bytes that the plans in force have moved out so far."""
        handles = handles_in_force(module) if self._handles is None else self._handles
        return sum(handle.offloaded_bytes for handle in handles)


def own_figures(
    figures: EpochFigures | None, host: int | None, offloaded: int, breakdown: bool
) -> dict[str, int | None]:
    """This rank's figures in bytes; a key without a figure is left out or None.

    The logged parts are those of the peak, with two exceptions: "activations" are those held when
    forward ended, and "other" is what then is left to the peak. So they add up to it; "other" is
    below zero where the activations were gone when the peak came (in the optimizer's step).
    """
    own: dict[str, int | None] = {"peak_host": host, "offloaded": offloaded}
    if figures is None or figures.num_steps == 0:
        return own
    own |= {PEAK: figures.peak, "peak_reserved": figures.reserved}
    if breakdown and figures.parts:
        held = {kind: figures.parts[kind] for kind in KINDS}
        activations = figures.activations
        rest = figures.peak - sum(held.values()) - (activations or 0)
        own |= {**held, "activations": activations, "other": rest}
        own |= {f"{part}_at_peak": num_bytes for part, num_bytes in figures.parts.items()}
    return own


def over_ranks(trainer: "pl.Trainer", own: Bytes) -> tuple[dict[str, int], int]:
    """The figures of the rank with the highest peak, and the maximum over ranks of those that are
    no part of it; and which rank that was. Every rank must call it, also one without figures."""
    rows = gathered(trainer, [own.get(key) for key in _FIGURES])
    rank = max(range(len(rows)), key=lambda index: rows[index][0] or 0)
    found: dict[str, int] = {}
    for position, key in enumerate(_FIGURES):
        among = rows if key in _PEAKS else [rows[rank]]
        present = [value for row in among if (value := row[position]) is not None]
        if present:
            found[key] = max(present)
    return found, rank


def log(module: "pl.LightningModule", figures: Mapping[str, float]) -> None:
    """Give figures to the loggers; the peak to the progress bar too."""
    for key, value in figures.items():
        # Equal on all ranks by now; Lightning warns each user when it is not told to reduce.
        module.log(key, value, prog_bar=key == KEY, sync_dist=True, reduce_fx="max")


def model_of(trainer: "pl.Trainer", module: "pl.LightningModule") -> nn.Module:
    """What the strategy trains: the module itself, or what it wrapped it in."""
    model = trainer.strategy.model
    return model if isinstance(model, nn.Module) else module


def logged(figures: Mapping[str, int], prefix: str = "") -> dict[str, float]:
    """Key and MiB of each figure that goes to the loggers."""
    return {
        f"memory/{prefix}{key}_MiB": value / _BYTES_PER_MIB
        for key, value in figures.items()
        if key not in _AT_PEAK
    }


def epoch_row(
    figures: Mapping[str, int], epoch: MeasuredEpoch, rank: int, source: str, module: nn.Module
) -> dict[str, Any]:
    """What `summary()` says of an epoch, as plain data."""
    return {
        "epoch": epoch.number,
        **{f"{key}_MiB": value / _BYTES_PER_MIB for key, value in figures.items()},
        "rank": rank,
        "source": source,
        "plan": epoch.plans(module),
        "step_s": statistics.median(epoch.seconds) if epoch.seconds else None,
    }


def _words(plans: Collection[_PlanWords]) -> str:
    """Of plans that followed each other on the same blocks."""
    fewest, most = min(plans), max(plans)
    shown = f"{fewest.num_recomputed} to " if fewest.num_recomputed < most.num_recomputed else ""
    places = {plan.offload for plan in plans}
    where = "".join(f", offload to {place}" for place in sorted(places - {""}))
    when = " at times" if where and len(places) > 1 else ""
    return f"{shown}{most.num_recomputed} of {most.num_blocks} blocks recomputed{where}{when}"
