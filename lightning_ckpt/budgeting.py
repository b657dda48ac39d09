"""A budget in a fit: some batches are measured, each other gets the fastest plan for its size."""

from collections import Counter
from itertools import chain
from typing import Any, Protocol

import lightning.pytorch as pl
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from typing_extensions import override

from lightning_ckpt.attached import Attached
from lightning_ckpt.core.budget.by_size import PlansBySize
from lightning_ckpt.core.budget.sizes import MOST_SIDES, Size, size_of
from lightning_ckpt.core.budget.weighing import LinkProbe
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.loss import takes_dataloader_iter
from lightning_ckpt.core.memory import find_compiled
from lightning_ckpt.core.offload import OffloadConfig
from lightning_ckpt.core.plan import Plan
from lightning_ckpt.measuring import MeasuredBatch
from lightning_ckpt.ranks import gathered, is_alone, largest_of_ranks
from lightning_ckpt.summary import print_batches, print_note


class Owner(Protocol):
    """Whoever has the plan in force."""

    handle: Handle | None

    def put(self, plan: Plan) -> None:
        """Put a plan of the same blocks in force."""

    def tell(self, trainer: "pl.Trainer") -> None:
        """Print the plan in force, and give it to the loggers."""


class BudgetedBatches(Attached):
    """Before each batch of a fit it puts the fastest plan within the budget in force, for the size
    of that batch, or lets it be measured. The adapters add it to the trainer's callbacks.

    All ranks do the same: they agree on the largest of their sizes before a batch, and share what
    they measure.

    Args:
        owner: has the plan in force, which recomputes every block at first.
        word: the budget as the user said it.
        budget: bytes, of this rank.
        offload: what a plan may offload; None: nothing.

    Raises:
        ValueError: the machine cannot do what `offload` says.
    """

    def __init__(
        self, owner: Owner, word: Any, budget: int, offload: OffloadConfig | None = None
    ) -> None:
        self._owner = owner
        self._word = word
        self._budget = budget
        self._offload = offload
        self._probe = None if offload is None else LinkProbe(offload)
        self._one_plan_since = ""  # why there is one plan for all sizes, if there is
        self.forget()

    def forget(self) -> None:
        """The blocks are others: measure anew."""
        self._plans: PlansBySize | None = None
        self._all: Plan | None = None  # recomputes every block
        self._size_now: Size | None = None
        self._now: MeasuredBatch | None = None
        self._done: list[MeasuredBatch] = []
        self._first_step = 0
        self._sizes: set[Size] = set()  # the first, and one that is another
        self._counts: Counter[str] = Counter()

    @property
    def is_planned(self) -> bool:
        """Whether a plan was chosen, so that the one in force is no mere measurement."""
        return self._plans is not None

    @property
    def is_measuring(self) -> bool:
        """Whether the batch in hand is measured."""
        return self._now is not None

    @property
    def plan(self) -> Plan | None:
        """The plan of the largest batch so far, None before there is one."""
        return None if self._plans is None else self._plans.largest().plan

    def tighter(self) -> Plan | None:
        """Lower the budget, as the batch ran out of memory within it; gives a plan for this batch,
        None where nothing is known of it."""
        handle = self._owner.handle
        if self._plans is None or self._size_now is None or handle is None or self.is_measuring:
            return None
        plan = self._plans.lower(self._size_now, handle.plan)
        self._budget = self._plans.budget  # for other blocks, too
        return plan

    @override
    def attach(self, trainer: "pl.Trainer") -> None:
        reasons = gathered(trainer, _why_one_plan(trainer.lightning_module))
        self._one_plan_since = next(filter(None, reasons), "")
        super().attach(trainer)

    @override
    def detach(self) -> None:
        self._stop()
        super().detach()

    @override
    def on_train_batch_start(
        self, trainer: "pl.Trainer", pl_module: "pl.LightningModule", batch: Any, batch_idx: int
    ) -> None:
        self._stop()  # of a batch whose end was not called
        handle = self._owner.handle
        if handle is None:
            return
        size = self._size(trainer, batch, batch_idx)
        self._size_now = size
        plan = self._choose(trainer, size)
        if plan is not None:
            self._follow(plan)
            return
        if self._all is None:
            self._all, self._first_step = handle.plan, trainer.global_step
        self._owner.put(self._all)
        self._counts["measured"] += 1
        self._now = MeasuredBatch(trainer, pl_module, handle, batch, size, self._probe)

    def _size(self, trainer: "pl.Trainer", batch: Any, batch_idx: int) -> Size:
        if self._one_plan_since:
            return size_of(None)
        # The others of an optimizer's step still have the gradients of those before them.
        is_first = batch_idx % trainer.accumulate_grad_batches == 0
        return size_of(batch, kind=int(not is_first))

    def _choose(self, trainer: "pl.Trainer", size: Size) -> Plan | None:
        """The plan for the batch, the same on all ranks; None: all measure it."""
        if self._plans is None:
            return None
        if is_alone(trainer) or self._one_plan_since:
            self._notice(size)
            return self._plans.choose(size)
        agreed = _agreed_size(trainer, size)
        self._notice(agreed or size)
        plan = None if agreed is None else self._plans.choose(agreed)
        # No rank may ever have a batch as large as all of theirs.
        return plan or self._plans.choose_for_all(gathered(trainer, size))

    def _notice(self, size: Size) -> None:
        if len(self._sizes) == 1 and size._replace(kind=0) not in self._sizes:
            self._sizes.add(size._replace(kind=0))
            self._say_that_sizes_vary()

    @rank_zero_only
    def _say_that_sizes_vary(self) -> None:
        print_note(
            f"batches differ in size: from here on each has the fastest plan for its own size "
            f"within budget={self._word}"
        )

    def _follow(self, plan: Plan) -> None:
        self._owner.put(plan)
        num = plan.num_recomputed
        self._counts["none" if not num else "all" if num == len(plan) else "some"] += 1

    @override
    def on_before_zero_grad(self, *args: Any) -> None:
        if self._now is not None:
            self._now.mark("zero_grad")

    @override
    def on_before_optimizer_step(self, *args: Any) -> None:
        if self._now is not None:
            self._now.mark("optimizer")

    @override
    def on_train_batch_end(
        self,
        trainer: "pl.Trainer",
        pl_module: "pl.LightningModule",
        outputs: Any,
        batch: Any,
        batch_idx: int,
    ) -> None:
        if self._now is None:
            return
        self._now.pause()
        # Of micro-batches of one size the last: the optimizer may step in it. (Without sides they
        # may be unlike.)
        size = self._now.size
        self._done = [done for done in self._done if done.size != size or not size.dims]
        self._done.append(self._now)
        self._now = None
        # At first the optimizer's states are not there yet: wait until they are.
        if self._plans is not None or trainer.global_step != self._first_step:
            self._learn(trainer)

    def _learn(self, trainer: "pl.Trainer") -> None:
        done, self._done = self._done, []
        own = [(batch.size, batch.finish(trainer.optimizers)) for batch in done]
        found, budgets = zip(*gathered(trainer, (own, self._budget)), strict=True)
        is_settled = self._plans is not None
        if self._plans is None:
            assert self._all is not None
            notes = [*self._all.notes, *self._fixed_note()]
            self._plans = PlansBySize(min(budgets), notes, self._offload)
        self._plans.add([*chain(*found)], is_settled=is_settled)
        if not is_settled:
            self._sizes = {done[0].size._replace(kind=0)}
            self._owner.put(self._plans.largest().plan)
            self._owner.tell(trainer)

    def _fixed_note(self) -> list[str]:
        why = self._one_plan_since
        return [f"{why}: the first step's plan holds for batches of any size"] if why else []

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        self._stop()
        if self._plans is not None and len(self._sizes) > 1:
            self._tell_at_end(trainer)

    @rank_zero_only
    def _tell_at_end(self, trainer: "pl.Trainer") -> None:
        assert self._plans is not None
        largest = self._plans.largest()
        print_batches(self._counts, str(largest.size), largest.plan)
        plan = {"plan": largest.plan.to_dict(), "batches": dict(self._counts)}
        for logger in trainer.loggers:  # under a new name: some take no other value for an old one
            logger.log_hyperparams({"partial_checkpoint_largest_batch": plan})

    def _stop(self) -> None:
        if self._now is not None:
            self._now.stop()
        self._now = None


def _why_one_plan(module: "pl.LightningModule") -> str:
    """Why a plan cannot go by the batch, empty if it can."""
    if compiled := find_compiled(module):
        return f"{compiled} is compiled, and would be compiled anew for another plan"
    if takes_dataloader_iter(module):
        return "training_step takes a dataloader_iter, so a batch is not known before its step"
    return ""


def _agreed_size(trainer: "pl.Trainer", size: Size) -> Size | None:
    """The largest of each side over all ranks; None where their batches have not the same parts."""
    padded = [*size.dims, *[0] * (MOST_SIDES - len(size.dims))]
    checksum = size.checksum
    most, least, *found = largest_of_ranks(trainer, [checksum, -checksum, *padded])
    return size._replace(dims=tuple(found[: len(size.dims)])) if most == -least else None
