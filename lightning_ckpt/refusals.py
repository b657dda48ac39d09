"""Trainers that a plan cannot be in force in."""

from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.accelerators import XLAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_ckpt._lightning import checkpoints_by_itself
from lightning_ckpt.fitting import FitPlan


def refuse_conflicts(trainer: "pl.Trainer") -> None:
    """Refuse a trainer in which blocks would be recomputed twice.

    Raises:
        MisconfigurationException: it has several owners of a plan, or a strategy that checkpoints.
    """
    owners = [callback for callback in trainer.callbacks if _owns_plan(callback)]  # type: ignore[attr-defined]
    if len(owners) > 1:
        intervals = ", ".join(f"every_n={owner.every_n}" for owner in owners)
        raise MisconfigurationException(
            f"the trainer has {len(owners)} PartialCheckpoint callbacks ({intervals}); keep one"
        )
    strategy = type(trainer.strategy).__name__
    if owners and _owns_plan(trainer.strategy):
        raise MisconfigurationException(
            f"PartialCheckpoint is in the trainer's callbacks and {strategy} does the same: drop "
            "the callback, or use the plain strategy; the strategy acts at the better moment"
        )
    if checkpoints_by_itself(trainer.strategy):
        raise MisconfigurationException(
            f"{strategy} has activation_checkpointing_policy set, and PartialCheckpoint is there "
            "too: blocks would be recomputed twice; drop one of the two"
        )
    _warn_of_idle_flags(trainer.strategy)


def refuse_xla(trainer: "pl.Trainer") -> None:
    """Refuse a device on which torch cannot checkpoint: it takes the device's random numbers from
    `torch.xla`, and there is none (transformers#29314, seen with torch 2.1 to 2.9).

    Raises:
        MisconfigurationException: the trainer's accelerator is XLA.
    """
    if isinstance(trainer.accelerator, XLAAccelerator) and not hasattr(torch, "xla"):
        raise MisconfigurationException(
            "PartialCheckpoint cannot work on XLA devices: torch.utils.checkpoint needs torch.xla, "
            "which does not exist; drop it, and call torch_xla.utils.checkpoint.checkpoint in the "
            "model"
        )


def _warn_of_idle_flags(strategy: Strategy) -> None:
    """DeepSpeed's checkpointing acts only where a model calls it."""
    if not isinstance(strategy, DeepSpeedStrategy) or not isinstance(strategy.config, dict):
        return
    settings = strategy.config.get("activation_checkpointing") or {}
    idle = [name for name in ("partition_activations", "cpu_checkpointing") if settings.get(name)]
    if idle:
        rank_zero_warn(
            f"DeepSpeedStrategy has {' and '.join(idle)} set, which has no effect on the blocks of "
            "PartialCheckpoint: it acts where the model calls deepspeed.checkpointing.checkpoint; "
            "use PartialCheckpoint(offload=True)"
        )


def _owns_plan(adapter: Any) -> bool:
    return isinstance(getattr(adapter, "fit_plan", None), FitPlan)
