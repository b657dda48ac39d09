"""The Lightning callback: hooks that call the core, nothing else."""

from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback
from typing_extensions import override

from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.offload import OffloadConfig
from lightning_ckpt.core.plan import check_switch
from lightning_ckpt.fitting import FitPlan
from lightning_ckpt.refusals import refuse_conflicts, refuse_xla
from lightning_ckpt.verifying import refuse_unverifiable, verify_in_fit


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
            backward, "disk" to a file; an `OffloadConfig` says more. What was moved is printed
            after the first step, and `handle.offloader.report()` has it at any time.
        layers: which modules are the blocks, if not those that are found by themselves: a class, a
            class name, a pattern of qualified names (`"encoder.layers.*"`), several of these, or a
            predicate `(name, module) -> bool`. Names are those within the LightningModule.
        verify: on the first batch of fit, run one step plain and one checkpointed and end the
            training if they differ (`lightning_ckpt.verify` says what it compares and costs).
            What two plain steps do not have alike either is a warning. With `budget` or `plan`
            every block is computed again in it.
        budget: in place of `every_n`, what the peak of a step may take: bytes (`"14GiB"`, an int),
            a share of the device's memory (`0.9`), or `"auto"` (what is free when fit starts, less
            a margin). The first step recomputes every block and is measured; from the second on
            the fastest plan within the budget is in force. With `offload` beside it that plan may
            offload as well, block by block. Where batches differ in size each gets the plan for its
            own; now and then one that is larger than all before is measured too.
        plan: in place of all above but `verify`, what happens to each block: a `Plan`, its dict, or
            the path of a YAML or JSON file.
        on_oom: what an out-of-memory error in forward or backward does. "raise": it ends the run.
            "tighten": the batch is repeated under a tighter plan, which stays, as if it had not
            failed; `num_oom` counts these. It costs a look at the module's state before each batch,
            and needs one device and automatic optimization (docs/budget.md).

    Raises:
        TypeError: an argument is of a wrong kind.
        ValueError: an argument has an impossible value, or contradicts another; at the start of
            fit: no block was found; after the first step: no plan is within the budget.
        MisconfigurationException: a second `PartialCheckpoint`, a strategy that checkpoints, or an
            XLA device; `verify` with a strategy that shards, or a module that optimizes by hand;
            `on_oom="tighten"` with several ranks, or where a batch cannot be repeated.
        RuntimeError: `verify` found a difference.
    """

    def __init__(
        self,
        every_n: int = 1,
        offload: bool | str | OffloadConfig = False,
        layers: Any = None,
        verify: bool = False,
        budget: int | float | str | None = None,
        plan: Any = None,
        on_oom: str = "raise",
    ) -> None:
        self.fit_plan = FitPlan(every_n, offload, layers, budget, plan, on_oom)
        check_switch("verify", verify)
        self.verify = verify
        self._is_verified = False

    @property
    def every_n(self) -> int:
        """The interval."""
        return self.fit_plan.every_n

    @property
    def offload(self) -> bool | str | OffloadConfig:
        """Where the inputs of checkpointed blocks wait, in the user's words."""
        return self.fit_plan.offload

    @property
    def layers(self) -> Any:
        """Which modules are the blocks, in the user's words."""
        return self.fit_plan.layers

    @property
    def handle(self) -> Handle | None:
        """The plan in force, None outside of fit."""
        return self.fit_plan.handle

    @property
    def num_oom(self) -> int:
        """How many out-of-memory errors were met by a tighter plan, in this fit or the last."""
        return self.fit_plan.num_oom

    @override
    def setup(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage != "fit":
            return
        refuse_conflicts(trainer)
        refuse_xla(trainer)
        if self.verify:
            refuse_unverifiable(trainer, pl_module)
        self._is_verified = False
        self.fit_plan.remove()
        with suppress(ValueError):  # not built yet, perhaps: on_fit_start lets the error through
            self.fit_plan.apply(pl_module)

    @override
    def on_fit_start(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self.fit_plan.apply_on_all_ranks(pl_module)
        self.fit_plan.measure(trainer)
        self.fit_plan.survive(trainer)
        self.fit_plan.tell(trainer)  # what they refuse is not told of before

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        self.fit_plan.follow(trainer)  # the module's own hooks of the epoch have run
        if self.verify and not self._is_verified:
            self._is_verified = True
            verify_in_fit(self.fit_plan, pl_module, batch, batch_idx)
        self.fit_plan.begin_step(trainer, batch)

    @override
    def on_train_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        self.fit_plan.end_step()

    @override
    def on_save_checkpoint(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", checkpoint: dict[str, Any]
    ) -> None:
        # Not as the callback's state: Lightning would warn whoever resumes without the callback.
        if (plan := self.fit_plan.chosen_plan) is not None:
            checkpoint["partial_checkpoint"] = plan.to_dict()

    @override
    def on_exception(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", exception: BaseException
    ) -> None:
        self.fit_plan.remove()  # Lightning calls no callback teardown after an exception

    @override
    def teardown(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", stage: str) -> None:
        if stage == "fit":
            self.fit_plan.remove()
