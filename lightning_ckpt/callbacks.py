"""The Lightning callback: hooks that call the core, nothing else."""

from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_ckpt._lightning import checkpoints_by_itself
from lightning_ckpt.core.apply import Handle, apply_quietly
from lightning_ckpt.core.blocks import check_layers, find_blocks
from lightning_ckpt.core.offload import OffloadConfig, read_offload
from lightning_ckpt.core.plan import check_every_n
from lightning_ckpt.summary import print_plan


class PartialCheckpoint(Callback):
    """Checkpoint every `every_n`-th repeated block of the model while it is fitted.

        trainer = L.Trainer(callbacks=[PartialCheckpoint(every_n=4)])

    A checkpointed block keeps its inputs instead of its activations and is computed again in
    backward, so the step needs less memory and somewhat more time; gradients, parameters, buffers
    and saved checkpoints are those of plain training.

    It acts in `setup`, and once more before the first step for blocks that the module builds later
    (`LightningModule.setup`, `configure_model`). It prints what it did, on rank zero, and gives it
    to each logger as hyperparameters. The model is as it was after fit, and after an exception. In
    validate, test and predict it does nothing. A Lightning checkpoint carries the plan under
    `"partial_checkpoint"` for information only: a run may resume with another interval, or without
    this callback.

    Args:
        every_n: block `i` is checkpointed when `i % every_n == 0`; 1 is every block.
        offload: True or "host" moves the checkpointed blocks' inputs to pinned host memory until
            backward.
        layers: which modules are the blocks, if not those that are found by themselves: a class, a
            class name, a pattern of qualified names (`"encoder.layers.*"`), several of these, or a
            predicate `(name, module) -> bool`. Names are those within the LightningModule.

    Raises:
        TypeError: an argument is of a wrong kind.
        ValueError: an argument has an impossible value; at the start of fit: no block was found.
        MisconfigurationException: a second `PartialCheckpoint`, or a strategy that checkpoints.
    """

    def __init__(
        self, every_n: int = 1, offload: bool | str | OffloadConfig = False, layers: Any = None
    ) -> None:
        self.every_n = check_every_n(every_n)
        read_offload(offload)
        check_layers(layers)
        self.offload = offload
        self.layers = layers
        self.handle: Handle | None = None
        self._is_settled = False

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage != "fit":
            return
        _refuse_conflicts(trainer)
        self._remove()
        try:
            self._apply(pl_module)
        except ValueError:
            # Not built yet, perhaps; on_fit_start tries again and lets the error through.
            self._remove()

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._refresh(pl_module)
        self._tell(trainer)

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        if not self._is_settled:  # the module's own on_train_start runs after on_fit_start
            self._is_settled = True
            if self._refresh(pl_module):
                self._tell(trainer)

    @override
    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        # Not as the callback's state: Lightning would warn whoever resumes without the callback.
        if self.handle is not None:
            checkpoint["partial_checkpoint"] = self.handle.plan.to_dict()

    @override
    def on_exception(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException
    ) -> None:
        self._remove()  # Lightning calls no callback teardown after an exception

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage == "fit":
            self._remove()

    def _apply(self, pl_module: "pl.LightningModule") -> None:
        self.handle = apply_quietly(pl_module, self.every_n, self.offload, self.layers)
        self._is_settled = False

    def _refresh(self, pl_module: "pl.LightningModule") -> bool:
        """Apply anew if the blocks are no longer those that the plan was made for."""
        found = [block.module for block in find_blocks(pl_module, self.layers)]
        if self.handle is not None and self.handle.modules == found:
            return False
        self._remove()
        self._apply(pl_module)
        return True

    def _remove(self) -> None:
        if self.handle is not None:
            self.handle.remove()
        self.handle = None

    @rank_zero_only
    def _tell(self, trainer: "pl.Trainer") -> None:
        assert self.handle is not None
        plan = self.handle.plan
        print_plan(plan)
        for logger in trainer.loggers:
            logger.log_hyperparams(
                {
                    "partial_checkpoint": {
                        "every_n": plan.every_n,
                        "offload": plan.offload or "none",
                        "num_blocks": len(plan),
                        "recomputed": list(plan.recomputed),
                    }
                }
            )

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "handle": None}  # a plan in force is not for another process


def _refuse_conflicts(trainer: "pl.Trainer") -> None:
    callbacks = getattr(trainer, "callbacks", [])
    same = [callback for callback in callbacks if isinstance(callback, PartialCheckpoint)]
    if len(same) > 1:
        intervals = ", ".join(f"every_n={callback.every_n}" for callback in same)
        raise MisconfigurationException(
            f"the trainer has {len(same)} PartialCheckpoint callbacks ({intervals}); keep one"
        )
    if checkpoints_by_itself(trainer.strategy):
        raise MisconfigurationException(
            f"{type(trainer.strategy).__name__} has activation_checkpointing_policy set and "
            "PartialCheckpoint is in the trainer's callbacks: blocks would be recomputed twice; "
            "drop one of the two"
        )
