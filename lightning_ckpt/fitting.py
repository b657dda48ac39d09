"""A plan over one fit: what the callback and the strategies share."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_ckpt.budgeting import BudgetedBatches
from lightning_ckpt.core.apply import apply_plan_quietly, apply_quietly, check_words
from lightning_ckpt.core.blocks import check_layers, find_blocks
from lightning_ckpt.core.budget.weighing import weighed
from lightning_ckpt.core.budget.words import budget_bytes, read_budget
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.memory import peak_tracker
from lightning_ckpt.core.memory.peak import PeakUnavailable
from lightning_ckpt.core.named_blocks import named_blocks
from lightning_ckpt.core.offload import (
    OffloadConfig,
    OffloadReport,
    read_offload,
    watch_first_step,
)
from lightning_ckpt.core.out_of_memory.tighten import read_on_oom, tightened
from lightning_ckpt.core.plan import Plan, check_every_n, read_plan
from lightning_ckpt.ranks import FAILED, first_difference, from_all_ranks
from lightning_ckpt.summary import print_measuring, print_offload, print_plan
from lightning_ckpt.surviving import Surviving


class FitPlan:
    """The user's words, checked, and the handle while they are in force.

    Args:
        every_n, offload, layers, plan: as in `lightning_ckpt.apply_partial_checkpoint`.
        budget, on_oom: as in `PartialCheckpoint`.

    Raises:
        TypeError, ValueError: a word is impossible, or two contradict each other.
    """

    def __init__(
        self,
        every_n: int,
        offload: bool | str | OffloadConfig,
        layers: Any,
        budget: int | float | str | None = None,
        plan: Any = None,
        on_oom: str = "raise",
    ) -> None:
        self.every_n = check_every_n(every_n)
        read_offload(offload)
        check_layers(layers)
        check_words(every_n, offload, layers, budget, plan)
        self.offload = offload
        self.layers = layers
        self.budget = budget
        self.plan = None if plan is None else read_plan(plan)
        self.on_oom = read_on_oom(on_oom)
        self.handle: Handle | None = None
        self.num_oom = 0
        self._surviving: Surviving | None = None
        self._batches: BudgetedBatches | None = None
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
        if self.handle is not None and self.handle.modules == self._find(module):
            return False
        self.take_back()
        if self.plan is not None:
            self.handle = apply_plan_quietly(module, self.plan)
        else:
            later = self._weighed
            offload = self.offload if later is None else False  # not while steps are measured
            self.handle = apply_quietly(module, self.every_n, offload, self.layers, later)
        if self._batches is not None:
            self._batches.forget()  # other blocks: measure again
        self._is_watched = False
        return True

    @property
    def _weighed(self) -> OffloadConfig | None:
        """What the plans for a budget may offload; None: nothing, or there is no budget."""
        return None if self.budget is None else weighed(self.offload)

    def _find(self, module: "pl.LightningModule") -> list[nn.Module]:
        if self.plan is None:
            return [block.module for block in find_blocks(module, self.layers)]
        return [block.module for block in named_blocks(module, self.plan)]

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
        report = [FAILED + str(error)] if error else self._describe(module)
        difference = first_difference(from_all_ranks(module.trainer, report))
        if error is not None:
            raise error
        if difference:  # the adapter takes the plan back, as after any error
            raise RuntimeError(difference)
        return changed

    def measure(self, trainer: "pl.Trainer") -> None:
        """With a budget: let batches be measured, and plans be chosen for the others.

        Raises:
            ValueError: the device does not say what the budget is a share of, or what it needs.
        """
        if self.budget is None or self._batches is not None:
            return
        device = trainer.strategy.root_device
        budget = budget_bytes(read_budget(self.budget), device)
        try:
            peak_tracker(device, trainer.lightning_module).stop()
        except PeakUnavailable as error:
            raise ValueError(
                f"budget={self.budget!r} needs a measured step: {error}. Without a measured step, "
                "every_n= and plan= work"
            ) from error
        self._batches = BudgetedBatches(self, self.budget, budget, self._weighed)
        self._batches.attach(trainer)

    def put(self, plan: Plan) -> None:
        """Put another plan of the same blocks in force."""
        assert self.handle is not None
        self.handle.change(plan)

    @property
    def chosen_plan(self) -> Plan | None:
        """The plan in force, of those that follow the batches that of the largest; or None."""
        chosen = self._batches.plan if self._batches is not None else None
        return chosen or (self.handle.plan if self.handle is not None else None)

    def survive(self, trainer: "pl.Trainer") -> None:
        """With `on_oom="tighten"`: repeat each batch that runs out of memory under a tighter plan.

        Raises:
            MisconfigurationException: batches of this trainer cannot be repeated.
        """
        if self.on_oom == "tighten" and self._surviving is None:
            self.num_oom = 0
            self._surviving = Surviving(
                lambda: self.handle,
                self._tighter,
                self._follow_tighter,
                lambda: self._batches is not None and self._batches.is_measuring,
            )
            self._surviving.attach(trainer)

    def _tighter(self, is_last: bool) -> Plan | None:
        if self.handle is None:
            return None
        plan = self._batches.tighter() if self._batches is not None and not is_last else None
        return plan or tightened(self.handle.plan, is_last=is_last or self.budget is not None)

    def _follow_tighter(self, module: "pl.LightningModule", plan: Plan) -> None:
        self.num_oom += 1
        if self.handle is not None and self.handle.offloader is None:
            self.put(plan)
            return
        self.take_back()  # what an offload was about when memory ran out is over
        config = self._weighed or read_offload(self.offload)
        self.handle = apply_plan_quietly(module, plan, config)
        self._is_watched = False

    def follow(self, trainer: "pl.Trainer") -> None:
        """`apply` once in each epoch, before its first step: the module may have built or exchanged
        blocks. (A resumed epoch does not begin with batch 0.)"""
        if self._settled_epoch != trainer.current_epoch:
            if self.apply(trainer.lightning_module):
                self.tell(trainer)
            self._settled_epoch = trainer.current_epoch

    def remove(self) -> None:
        """Leave the model, and the trainer, as they were."""
        self._settled_epoch = -1
        self.take_back()
        for attached in (self._batches, self._surviving):
            if attached is not None:
                attached.detach()
        self._batches = self._surviving = None

    def take_back(self) -> None:
        """Leave the model as it was; what is to be measured still is."""
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
        if offloader is not None and not self._is_watched and not self._only_measures:
            self._is_watched = True
            holders = (trainer.lightning_module, trainer.optimizers, batch)
            device = trainer.strategy.root_device
            self._end_first_step = watch_first_step(offloader, device, *holders)

    def end_step(self) -> None:
        """It has ended, or the next begins: print what was offloaded, on rank zero."""
        end, self._end_first_step = self._end_first_step, None
        if end is None:
            return
        report = end()
        if self.budget is not None and not report.out_bytes:
            self._is_watched = False  # the batch was measured, which says nothing of offload
            return
        _tell_of_offload(report)

    @property
    def _only_measures(self) -> bool:
        """Whether there is a budget, and nothing to offload in the plan in force."""
        return self.budget is not None and self.handle is not None and not self.handle.plan.offload

    @rank_zero_only
    def tell(self, trainer: "pl.Trainer") -> None:
        """Print the plan in force, and give it to the loggers. That of a step that is only to be
        measured is not given: some loggers (MLflow) refuse to take another value later."""
        if self.handle is None:
            return
        if self.budget is not None and (self._batches is None or not self._batches.is_planned):
            print_measuring(self.handle.plan, self.budget)
            return
        print_plan(self.handle.plan, after_progress=self.budget is not None)
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
        of_a_fit = ("handle", "_batches", "_surviving", "_end_first_step")
        return vars(self) | dict.fromkeys(of_a_fit)


@rank_zero_only
def _tell_of_offload(report: OffloadReport) -> None:
    print_offload(report)


def _metadata(plan: Plan) -> dict[str, Any]:
    return {
        "every_n": plan.every_n,
        "offload": plan.offload or "none",
        "num_blocks": len(plan),
        "recomputed": list(plan.recomputed),
        **({} if plan.every_n else {"plan": plan.to_dict()}),
    }
