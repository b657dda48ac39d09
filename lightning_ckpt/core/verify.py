"""One step plain and one checkpointed, from one state: what differs, and which block it comes from.

A step is a forward, a loss and its gradients, without an optimizer. Gradients are taken by
`torch.autograd.grad`, so that `.grad` stays as it is and nothing that waits for it is woken
(optimizers that step in backward, DDP).
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import takewhile
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ckpt.core.apply import apply_quietly
from lightning_ckpt.core.blocks import Block, find_blocks
from lightning_ckpt.core.loss import check_function, model_loss
from lightning_ckpt.core.offload import OffloadConfig
from lightning_ckpt.core.plan import every_n_plan
from lightning_ckpt.core.report import Difference, Report
from lightning_ckpt.core.sameness import ABSENT, is_equal
from lightning_ckpt.core.snapshot import Snapshot
from lightning_ckpt.core.step import Key, Loss, Result, Step
from lightning_ckpt.core.swap import is_swapped

Checkpointed = Callable[[nn.Module | None], Result]


def verify(
    module: nn.Module,
    batch: Any,
    *,
    every_n: int = 1,
    offload: bool | str | OffloadConfig = False,
    layers: Any = None,
    loss: Loss | None = None,
    strangers: Iterable[Any] = (),
) -> Report:
    """Run one step plain and one checkpointed from the same state, and compare them bit by bit.

    The module, the batch and all generators are left as they were. It takes the memory of plain
    training, the gradients twice and the state once besides. Where the steps differ it runs more
    of them: three plain ones, and one for each block that was recomputed.

    Args:
        module: any model without a plan in force, in the mode (train, eval) that counts.
        batch: what `loss` is called with. Without `loss`, a mapping is passed as keyword arguments,
            a tuple or list as positional ones, anything else as the one argument.
        every_n, offload, layers: as in `apply_partial_checkpoint`.
        loss: `(module, batch) -> loss`, a tensor of one element. None: the model's own `loss` if
            its output has one, its output if that is one element, else the mean square of all
            tensors in it.
        strangers: objects that the module knows and that are no state of its own (a trainer).

    Raises:
        TypeError, ValueError: as `apply_partial_checkpoint`; a plan is in force, parameters are not
            made yet, or the loss needs no gradient.
        Exception: what the plain step raises.
    """
    blocks = find_blocks(module, layers)
    check_function("loss", loss, "module, batch: ...")
    _refuse(module)
    start = Snapshot({"": module, "batch": batch}, strangers)
    step = Step(module, batch, loss or model_loss, start)

    def checkpointed(only: nn.Module | None = None) -> Result:
        words = (every_n, offload, layers)
        if only is not None:
            words = (1, offload, lambda name, part: part is only)
        return step.run(lambda: apply_quietly(module, *words))

    try:
        plain = step.run()
        if plain.error is not None:
            raise plain.error
        ours = checkpointed()
        # By the plan, not by what was counted: recomputes in compiled code are not seen.
        plan = every_n_plan([(name, "") for name, _ in blocks], every_n, None)
        suspects = [block for block in blocks if block.name in plan.recomputed]
        differences = _differences(step, plain, ours, blocks, suspects, checkpointed)
    finally:
        start.restore()
    return Report(
        differences=differences,
        recomputes={block.name: ours.recomputes[block.module] for block in blocks},
        compared=dict(Counter(what for what, _ in plain.values | ours.values)),
        plain_peak_bytes=plain.peak_bytes,
        checkpointed_peak_bytes=ours.peak_bytes,
    )


def _refuse(module: nn.Module) -> None:
    for name, part in module.named_modules():
        if is_swapped(part):
            raise ValueError(
                f"module: {name!r} is checkpointed by a plan in force, so there is no plain step "
                "to compare with; remove the plan first"
            )
    for name, parameter in module.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"module: the parameter {name!r} is not made yet; run a batch through it first"
            )


def _differences(
    step: Step,
    plain: Result,
    ours: Result,
    blocks: Sequence[Block],
    suspects: Sequence[Block],
    checkpointed: Checkpointed,
) -> tuple[Difference, ...]:
    """What differs, and where from; takes more steps to find out, if anything does."""
    keys = _differing(plain, ours)
    if not keys:
        return ()
    noisy, begins = _noise(step, plain, blocks)
    origins = _origins([key for key in keys if key not in noisy], plain, suspects, checkpointed)
    return tuple(
        Difference(
            *key,
            detail=_detail(plain, ours, key),
            blocks=begins if key in noisy else tuple(origins[key]),
            in_plain_too=key in noisy,
        )
        for key in keys
    )


def _differing(plain: Result, ours: Result) -> list[Key]:
    """Keys of the values that differ; of a step that raised, only the error."""
    if ours.error is not None:
        return [("error", type(ours.error).__name__)]
    keys = [*plain.values, *(key for key in ours.values if key not in plain.values)]
    return [key for key in keys if not _is_same(plain, ours, key)]


def _is_same(one: Result, other: Result, key: Key) -> bool:
    """A state that is in one of them only has changed in that one only."""
    return is_equal(one.values.get(key, ABSENT), other.values.get(key, ABSENT))


def _noise(step: Step, plain: Result, blocks: Sequence[Block]) -> tuple[list[Key], tuple[str, ...]]:
    """What two plain steps do not have alike, and the block in which that begins."""
    again = step.run()
    noisy = _differing(plain, again)
    if not noisy:
        return [], ()
    pairs = zip(step.trace(blocks), step.trace(blocks), strict=False)
    differing = [one for one, other in pairs if one != other]
    if differing:
        # A tensor that leaves one block and enters the next is noted for both.
        same = takewhile(lambda moment: moment.sums == differing[0].sums, differing)
        return noisy, tuple(moment.block for moment in same if moment.comes_out)
    # Between blocks all is the same: gradients of weights, in the last block that has such.
    touched = [name for what, name in noisy if what == "gradient"]
    inside = [b.name for b in blocks if any(name.startswith(f"{b.name}.") for name in touched)]
    return noisy, tuple(inside[-1:])


def _origins(
    keys: Sequence[Key], plain: Result, suspects: Sequence[Block], checkpointed: Checkpointed
) -> dict[Key, list[str]]:
    """For each difference, the blocks that make it when they alone are checkpointed."""
    found: dict[Key, list[str]] = {key: [] for key in keys}
    if not keys:
        return found
    for block in suspects:
        alone = checkpointed(block.module)
        for key in keys:
            raised = alone.error is not None
            if raised if key[0] == "error" else not (raised or _is_same(plain, alone, key)):
                found[key].append(block.name)
    return found


def _detail(plain: Result, ours: Result, key: Key) -> str:
    if key[0] == "error":
        return str(ours.error)
    one, other = plain.values.get(key, ABSENT), ours.values.get(key, ABSENT)
    absent = {"gradient": "none", "state": "unchanged"}.get(key[0], "missing")
    if isinstance(one, Tensor) and isinstance(other, Tensor) and one.shape == other.shape:
        off = (one.double() - other.double()).abs().max() if one.numel() else 0
        return f"off by {float(off):.2g}, largest {float(one.double().abs().max()):.2g}"
    shown = [absent if value is ABSENT else _shown(value) for value in (one, other)]
    return f"plain: {shown[0]}; checkpointed: {shown[1]}"


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
