"""A plan over one fit: what the callback and the strategies share."""

import zlib
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.accelerators import XLAAccelerator
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only, rank_zero_warn
from torch.nn.parameter import is_lazy

from lightning_ckpt._lightning import checkpoints_by_itself
from lightning_ckpt.core.apply import Handle, apply_quietly
from lightning_ckpt.core.blocks import check_layers, find_blocks
from lightning_ckpt.core.offload import (
    OffloadConfig,
    OffloadReport,
    read_offload,
    watch_first_step,
)
from lightning_ckpt.core.plan import Plan, check_every_n
from lightning_ckpt.summary import print_offload, print_plan

T = TypeVar("T")

_FAILED = "failed: "  # begins the report of a rank that has no plan


class FitPlan:
    """The user's words, checked, and the handle while they are in force.

    Args:
        every_n, offload, layers: as in `lightning_ckpt.apply_partial_checkpoint`.

    Raises:
        TypeError, ValueError: a word is impossible.
    """

    def __init__(self, every_n: int, offload: bool | str | OffloadConfig, layers: Any) -> None:
        self.every_n = check_every_n(every_n)
        read_offload(offload)
        check_layers(layers)
        self.offload = offload
        self.layers = layers
        self.handle: Handle | None = None
        self._settled_epoch = -1
        self._end_first_step: Callable[[], OffloadReport] | None = None
        self._is_watched = False

    def apply(self, module: "pl.LightningModule") -> bool:
        """Put the plan in force, or make it anew if the blocks are others by now.

        Returns:
            Whether anything changed.

        Raises:
            ValueError: no blocks were found, or they are checkpointed by other means.
        """
        if self.handle is not None:
            found = [block.module for block in find_blocks(module, self.layers)]
            if self.handle.modules == found:
                return False
        self.remove()
        self.handle = apply_quietly(module, self.every_n, self.offload, self.layers)
        self._is_watched = False
        return True

    def apply_on_all_ranks(self, module: "pl.LightningModule") -> bool:
        """`apply`, and make sure that every rank of the run did the same.

        Raises:
            RuntimeError: another rank could not apply, or has another model or plan; on every rank.
            Exception: this rank could not apply.
        """
        error: Exception | None = None
        changed = False
        try:
            changed = self.apply(module)
        except Exception as caught:  # any: the other ranks must not wait for this one
            error = caught
        report = [_FAILED + str(error)] if error else self._describe(module)
        difference = _first_difference(from_all_ranks(module.trainer, report))
        if error is not None:
            raise error
        if difference:  # the adapter takes the plan back, as after any error
            raise RuntimeError(difference)
        return changed

    def follow(self, trainer: "pl.Trainer") -> None:
        """`apply` once in each epoch, before its first step: the module may have built or exchanged
        blocks. (A resumed epoch does not begin with batch 0.)"""
        if self._settled_epoch != trainer.current_epoch:
            if self.apply(trainer.lightning_module):
                self.tell(trainer)
            self._settled_epoch = trainer.current_epoch

    def remove(self) -> None:
        """Leave the model as it was."""
        self._settled_epoch = -1
        end, self._end_first_step = self._end_first_step, None
        if end is not None:
            end()  # an error: nobody wants to read that now
        if self.handle is not None:
            self.handle.remove()
        self.handle = None

    def begin_step(self, trainer: "pl.Trainer", batch: Any) -> None:
        """A training step begins: the first one's offload is watched."""
        self.end_step()
        offloader = self.handle.offloader if self.handle is not None else None
        if offloader is not None and not self._is_watched:
            self._is_watched = True
            holders = (trainer.lightning_module, trainer.optimizers, batch)
            device = trainer.strategy.root_device
            self._end_first_step = watch_first_step(offloader, device, *holders)

    def end_step(self) -> None:
        """It has ended, or the next begins: print what was offloaded, on rank zero."""
        end, self._end_first_step = self._end_first_step, None
        if end is not None:
            _tell_of_offload(end())

    @rank_zero_only
    def tell(self, trainer: "pl.Trainer") -> None:
        """Print the plan in force, and give it to the loggers."""
        if self.handle is None:
            return
        print_plan(self.handle.plan)
        for logger in trainer.loggers:
            logger.log_hyperparams({"partial_checkpoint": _metadata(self.handle.plan)})

    def _describe(self, module: "pl.LightningModule") -> list[str]:
        """What must be alike on every rank, a line for each block and each parameter."""
        assert self.handle is not None
        lines = [
            f"block {block.name!r} ({block.class_name}): {block.action}"
            + (f", offload to {block.offload}" if block.offload else "")
            for block in self.handle.plan
        ]
        if isinstance(module.trainer.strategy, FSDPStrategy):
            return lines  # it may have laid a flat part of the parameters on each rank by now
        return lines + [
            f"parameter {name!r} of shape {tuple(parameter.shape)}"
            for name, parameter in module.named_parameters()
            if not is_lazy(parameter)
        ]

    def __getstate__(self) -> dict[str, Any]:
        # A plan in force is not for another process.
        return {**vars(self), "handle": None, "_end_first_step": None}


@rank_zero_only
def _tell_of_offload(report: OffloadReport) -> None:
    print_offload(report)


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


def _metadata(plan: Plan) -> dict[str, Any]:
    return {
        "every_n": plan.every_n,
        "offload": plan.offload or "none",
        "num_blocks": len(plan),
        "recomputed": list(plan.recomputed),
    }


def from_all_ranks(trainer: "pl.Trainer", report: list[str]) -> list[list[str]]:
    """Each rank's report, or only this one's where all are alike."""
    # Not the process group's size: one rank of a group may train alone, on a single device.
    if trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized()):
        return [report]
    # All reports would be many bytes with many ranks; they are needed only where they differ.
    if len(set(_gather(zlib.crc32("\n".join(report).encode())))) == 1:
        return [report]
    return _gather(report)


def _gather(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _first_difference(reports: list[list[str]]) -> str | None:
    """What to say of ranks that failed, or whose reports are not that of rank 0."""
    for rank, report in enumerate(reports):
        if report[0].startswith(_FAILED):
            return f"rank {rank} could not make its plan: {report[0].removeprefix(_FAILED)}"
    for rank, report in enumerate(reports):
        for first, here in zip_longest(reports[0], report, fillvalue="nothing more"):
            if here != first:
                return (
                    f"the ranks have different plans or models: rank 0 has {first}, rank {rank} "
                    f"has {here}; build the same model and pass the same arguments on every rank"
                )
    return None
