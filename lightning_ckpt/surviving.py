"""`on_oom="tighten"`: a batch that runs out of memory is repeated under a tighter plan.

Forward and backward of a batch are one closure, before the optimizer moves. When it fails, what it
changed is undone, the plan is tightened, and it is called again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.memory import is_oom_error
from typing_extensions import override

from lightning_ckpt._lightning import Closure, around_closures
from lightning_ckpt.attached import Attached
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.loss import takes_dataloader_iter
from lightning_ckpt.core.out_of_memory.repeat import Retry, repeat
from lightning_ckpt.core.out_of_memory.sums import GradientSums
from lightning_ckpt.core.out_of_memory.undo import StateBefore
from lightning_ckpt.core.plan import Plan
from lightning_ckpt.summary import print_survived

Tighter = Callable[[bool], Plan | None]
Follow = Callable[["pl.LightningModule", Plan], None]


class Surviving(Attached):
    """Repeats batches. The adapters add it to the trainer's callbacks for one fit; a tuner (batch
    size, learning rate) takes these away while it runs, and then sees each error itself.

    Args:
        handle: gives the plan in force.
        tighter: gives a plan that needs less, None if there is none. Its argument: whether there
            will be no other try.
        follow: puts it in force.
        is_measured: whether the batch is measured for a budget.
    """

    def __init__(
        self,
        handle: Callable[[], Handle | None],
        tighter: Tighter,
        follow: Follow,
        is_measured: Callable[[], bool],
    ) -> None:
        self._handle = handle
        self._tighter = tighter
        self._follow = follow
        self._is_measured = is_measured
        self._undo: Callable[[], None] | None = None
        self._sums: GradientSums | None = None
        self._has_tightened = False

    @override
    def attach(self, trainer: "pl.Trainer") -> None:
        """Stand around each batch from now on.

        Raises:
            MisconfigurationException: batches of this trainer cannot be repeated.
        """
        refuse_unrepeatable(trainer)
        super().attach(trainer)

        def around(closure: Closure, *args: Any, **kwargs: Any) -> Any:
            if self not in trainer.callbacks:  # type: ignore[attr-defined]
                return closure.run(*args, **kwargs)
            return self._run(trainer, closure, *args, **kwargs)

        self._undo = around_closures(trainer, around, self._before_backward)

    @override
    def detach(self) -> None:
        if self._undo is not None:
            self._undo()
        self._undo = None
        super().detach()

    def _before_backward(self) -> None:
        if self._sums is not None:
            self._sums.begin_backward()

    def _run(self, trainer: "pl.Trainer", closure: Closure, *args: Any, **kwargs: Any) -> Any:
        module, before = trainer.lightning_module, self._plan
        state = StateBefore(module, closure.given, [trainer], _taking_part(trainer))
        optimized = (
            p for o in trainer.optimizers for group in o.param_groups for p in group["params"]
        )
        self._sums = GradientSums([*module.parameters(), *optimized])
        retry = Retry(
            is_out_of_memory,
            self._tighter,
            partial(self._follow, module),
            trainer.strategy.root_device,
            self._is_measured,
        )
        try:
            run = partial(closure.run, *args, **kwargs)
            result, num_tries = repeat(run, state, self._sums, retry)
        finally:
            self._sums = None
        if num_tries:
            self._has_tightened = True
            print_survived(
                (trainer.current_epoch, closure.batch_idx), before, self._plan, num_tries
            )
        return result

    @override
    def on_train_end(self, trainer: "pl.Trainer", pl_module: "pl.LightningModule") -> None:
        for logger in trainer.loggers if self._has_tightened else ():
            # By another name: some loggers (MLflow) take no second value for one.
            logger.log_hyperparams({"partial_checkpoint_final": self._plan.to_dict()})

    @property
    def _plan(self) -> Plan:
        handle = self._handle()
        return Plan(()) if handle is None else handle.plan


def _taking_part(trainer: "pl.Trainer") -> list[Callback]:
    """Callbacks that Lightning calls within a closure. Those of this package know of tries."""
    hooks = ("on_before_zero_grad", "on_before_backward", "on_after_backward")
    callbacks: list[Callback] = trainer.callbacks  # type: ignore[attr-defined]
    return [
        callback
        for callback in callbacks
        if not type(callback).__module__.startswith("lightning_ckpt.")
        and any(
            hook in vars(callback) or getattr(type(callback), hook) is not getattr(Callback, hook)
            for hook in hooks
        )
    ]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the memory of the device ran out (or torch's allocator on a CPU found no more)."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return all(isinstance(word, str) for word in error.args) and is_oom_error(error)


def refuse_unrepeatable(trainer: "pl.Trainer") -> None:
    """Refuse what would make a second try of a batch wrong, or hang.

    Raises:
        MisconfigurationException: several ranks, a strategy that wraps the model, manual
            optimization, or a training step that fetches its batch itself.
    """
    module, strategy = trainer.lightning_module, type(trainer.strategy).__name__
    reason = None
    if trainer.world_size > 1:
        reason = (
            f"there are {trainer.world_size} ranks: memory runs out on one, in the middle of what "
            "they do together, and the others would wait for it"
        )
    elif not isinstance(trainer.strategy, SingleDeviceStrategy):
        reason = (
            f"{strategy} keeps account of each backward by itself, and knows nothing of one that "
            "failed; with one device use strategy='auto' or 'partial_checkpoint'"
        )
    elif not module.automatic_optimization:
        reason = (
            f"{type(module).__name__} optimizes by hand, and may have stepped when memory runs "
            "out; use automatic optimization"
        )
    elif takes_dataloader_iter(module):
        reason = (
            f"{type(module).__name__}.training_step takes a dataloader_iter, and would fetch "
            "another batch; let it take a batch"
        )
    if reason is not None:
        raise MisconfigurationException(
            f"on_oom='tighten' repeats a batch that ran out of memory, which cannot be: {reason}; "
            "or drop on_oom"
        )
