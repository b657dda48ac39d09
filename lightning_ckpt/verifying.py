"""`verify` for Lightning: a module's own training step, and the first batch of a fit."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import nn

from lightning_ckpt.core.loss import training_step_loss as run_training_step
from lightning_ckpt.core.loss import why_no_training_step
from lightning_ckpt.core.offload import OffloadConfig
from lightning_ckpt.core.report import Report
from lightning_ckpt.core.step import Loss
from lightning_ckpt.core.verify import verify as verify_step
from lightning_ckpt.extra_steps import extra_steps
from lightning_ckpt.fitting import FitPlan
from lightning_ckpt.ranks import from_all_ranks
from lightning_ckpt.rows import origin
from lightning_ckpt.summary import print_report


def verify(
    module: nn.Module,
    batch: Any,
    *,
    every_n: int = 1,
    offload: bool | str | OffloadConfig = False,
    layers: Any = None,
    loss: Loss | None = None,
    show: bool = True,
) -> Report:
    """Run one step plain and one checkpointed from the same state, and compare them bit by bit.

        report = verify(module, next(iter(loader)))
        assert report.ok, report.differences

    The step is forward and backward, without an optimizer. Compared are the loss, each gradient,
    each buffer and attribute, and every random generator; counted are recomputes and bytes. The
    module, the batch and all generators are left as they were. It takes the memory of plain
    training, the gradients twice and the state once besides; where something differs, a few more
    steps tell which block it comes from, and whether two plain steps differ too.

    It cannot put back what the module reaches only through closures, globals, class attributes,
    loggers or files.

    Args:
        module: any model without a plan in force, in the mode (train, eval) that counts.
        batch: on the module's device. Without `loss`: given to the `training_step` of a
            LightningModule; to any other model as keyword arguments if it is a mapping, as
            positional ones if it is a tuple or list, else as the one argument.
        every_n, offload, layers: as in `apply_partial_checkpoint`.
        loss: `(module, batch) -> loss`, a tensor of one element. Without it, that of the training
            step, the model's own `loss` if its output has one, its output if that is one element,
            else the mean square of all tensors in it.
        show: whether to print the report.

    Raises:
        TypeError, ValueError: as `apply_partial_checkpoint`; a plan is in force, parameters are not
            made yet, or the loss needs no gradient.
        MisconfigurationException: the module optimizes by hand and there is no `loss`.
        Exception: what the plain step raises.
    """
    known: list[Any] = []
    if isinstance(module, pl.LightningModule):
        known = _outside(module)
        loss = loss or training_step_loss(module)
    report = verify_step(
        module,
        batch,
        every_n=every_n,
        offload=offload,
        layers=layers,
        loss=loss,
        strangers=known,
    )
    if show:
        print_report(report)
    return report


def training_step_loss(module: "pl.LightningModule", batch_idx: int = 0) -> Loss:
    """The loss of the module's own training step, in the trainer's precision. It logs nothing.

    Raises:
        MisconfigurationException: the step needs more than a batch.
    """
    if reason := why_no_training_step(module):
        raise MisconfigurationException(
            f"verify: {type(module).__name__} {reason}, so its training step cannot be run by "
            "itself; call lightning_ckpt.verify(module, batch, loss=lambda module, batch: ...)"
        )

    def loss(_: nn.Module, batch: Any) -> Any:
        with _silent(module), _precision(module):
            return run_training_step(module, batch, batch_idx)

    return loss


def refuse_unverifiable(trainer: "pl.Trainer", module: "pl.LightningModule") -> None:
    """Refuse at the start what `verify_in_fit` could not do.

    Raises:
        MisconfigurationException: gradients lie in parts on several ranks, or the training step
            needs more than a batch.
    """
    if isinstance(trainer.strategy, (FSDPStrategy, ModelParallelStrategy)):
        raise MisconfigurationException(
            f"verify=True does not work with {type(trainer.strategy).__name__}, which shards "
            "parameters and gradients; call lightning_ckpt.verify(module, batch) on one device"
        )
    training_step_loss(module)


def verify_in_fit(plan: FitPlan, module: "pl.LightningModule", batch: Any, batch_idx: int) -> None:
    """Verify `plan`, which is in force, on a batch of a running fit; each rank on its own batch.
    Of a plan that was given block by block, or will be chosen by a budget, every block is computed
    again in it.

    Raises:
        RuntimeError: a step differs by checkpointing, on this rank or another.
    """
    trainer = module.trainer
    plan.take_back()
    with extra_steps(trainer, module, batch):
        try:
            report = verify(
                module,
                batch,
                every_n=plan.every_n,
                offload=plan.offload,
                layers=plan.layers,
                loss=training_step_loss(module, batch_idx),
                show=trainer.is_global_zero,
            )
        finally:
            plan.apply(module)
    ours = [d for d in report.differences if not d.in_plain_too]
    if not report.ok and not ours:
        rank_zero_warn(
            "verify: two plain steps from one state differ too, so nothing can be said of "
            f"checkpointing; it begins in {report.differences[0].blocks or 'no block'}. Try "
            "Trainer(deterministic=True)"
        )
    lines = [f"{d.what} {d.name!r} ({d.detail}) comes from {origin(d)}" for d in ours]
    for rank, found in enumerate(from_all_ranks(trainer, lines)):
        if found:
            raise RuntimeError(
                f"verify: {len(found)} values differ between the plain and the checkpointed step "
                f"(rank {rank}); the first: {found[0]}. Keep those blocks out by `layers=`, or see "
                "docs/limits.md"
            )


def _outside(module: "pl.LightningModule") -> list[Any]:
    """What the module knows and is no state of its own."""
    found: list[Any] = [module.fabric] if module.fabric is not None else []
    with suppress(RuntimeError):  # not attached
        found.append(module.trainer)
    return found


def _precision(module: "pl.LightningModule") -> AbstractContextManager[Any]:
    with suppress(RuntimeError, AttributeError):  # not attached, or to Fabric
        return module.trainer.precision_plugin.train_step_context()
    return nullcontext()


@contextmanager
def _silent(module: "pl.LightningModule") -> Iterator[None]:
    """Let `log` and `log_dict` do nothing: these steps are no part of the training."""
    own = vars(module)
    before: dict[str, Any] = {name: own[name] for name in ("log", "log_dict") if name in own}
    own.update(log=_nothing, log_dict=_nothing)
    try:
        yield
    finally:
        del own["log"], own["log_dict"]
        own.update(before)


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None
