"""Make a model follow a plan, and undo it."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from lightning_ckpt.core.blocks import Block, select_blocks
from lightning_ckpt.core.budget.words import read_budget
from lightning_ckpt.core.handle import Handle, put_plan_in_force, refuse_nested
from lightning_ckpt.core.named_blocks import named_blocks, refuse_checkpointed
from lightning_ckpt.core.offload import (
    OffloadConfig,
    make_offloader,
    nothing_to_move,
    read_offload,
)
from lightning_ckpt.core.plan import (
    Plan,
    PlanLike,
    check_every_n,
    every_n_plan,
    read_plan,
)

logger = logging.getLogger("lightning_ckpt")


def apply_partial_checkpoint(
    module: nn.Module,
    every_n: int = 1,
    offload: bool | str | OffloadConfig = False,
    layers: Any = None,
    *,
    plan: PlanLike | None = None,
) -> Handle:
    """Make every `every_n`-th repeated block of `module` checkpoint itself.

    A checkpointed block keeps its inputs instead of its activations and is computed again in
    backward, with the same random numbers, buffers and autocast, so gradients and state are those
    of plain training. It does so whenever autograd records, in train and in eval mode. Nothing
    else about the model changes: names, `state_dict`, hooks, `isinstance`, copies and pickles.

        with apply_partial_checkpoint(model, every_n=2):
            model(batch).sum().backward()

    Args:
        module: any model, or a part of one.
        every_n: block `i` is checkpointed when `i % every_n == 0`; 1 is every block.
        offload: True or "host" moves the checkpointed blocks' inputs to pinned host memory until
            backward needs them, "disk" to a file; an `OffloadConfig` says more.
        layers: which modules are the blocks, if not those that `find_blocks` finds by itself: a
            class, a class name, a pattern of qualified names (`"encoder.layers.*"`), several of
            these, or a predicate `(name, module) -> bool`.
        plan: what happens to each block, in place of the arguments above: a `Plan`, its dict, or
            the path of a YAML or JSON file. Blocks that it does not name are kept.

    Returns:
        A handle with the applied plan, that undoes it.

    Raises:
        TypeError: an argument is of a wrong kind.
        ValueError: an argument has an impossible value, no block was found, or a block is
            checkpointed by other means already.
    """
    if plan is None:
        handle = apply_quietly(module, every_n, offload, layers)
    else:
        check_words(every_n, offload, layers, plan=plan)
        handle = apply_plan_quietly(module, read_plan(plan))
    for note in handle.plan.notes:
        logger.warning(note)
    return handle


def apply_quietly(
    module: nn.Module,
    every_n: int,
    offload: bool | str | OffloadConfig,
    layers: Any,
    later: OffloadConfig | None = None,
) -> Handle:
    """`apply_partial_checkpoint` for those who print `plan.notes` themselves.

    Args:
        module, every_n, offload, layers: as there.
        later: in place of `offload`: what plans that the handle changes to may offload.
    """
    check_every_n(every_n)
    config = read_offload(offload)
    blocks, notes = select_blocks(module, layers)
    names = [(block.name, type(block.module).__name__) for block in blocks]
    target, scope = (config.target, config.scope) if config else (None, "inputs")
    plan = every_n_plan(names, every_n, target, notes, scope)
    return _apply(module, blocks, plan, config or later, is_steady=later is not None)


def apply_plan_quietly(
    module: nn.Module, plan: Plan, config: OffloadConfig | None = None
) -> Handle:
    """Put a plan of this model in force, block by block.

    Args:
        module: the model.
        plan: the plan; it says which blocks offload, and where to.
        config: says the rest of offload; None: as by default.

    Raises:
        ValueError: a block that it names is not there, is of another class, or lies in another.
    """
    if config is None and plan.offload:
        config = OffloadConfig(target=plan.offload, scope="all")
    blocks = named_blocks(module, plan)
    return _apply(module, blocks, _with_class_names(plan, blocks), config, is_steady=True)


def _with_class_names(plan: Plan, blocks: Sequence[Block]) -> Plan:
    """A plan that somebody wrote may leave them out."""
    named = (
        replace(entry, class_name=type(block.module).__name__)
        for entry, block in zip(plan, blocks, strict=True)
    )
    return replace(plan, blocks=tuple(named))


def check_words(
    every_n: int, offload: Any, layers: Any, budget: Any = None, plan: Any = None
) -> None:
    """Refuse words beside one that says the same in another way.

    Raises:
        ValueError: two contradict each other.
    """
    given = {
        "every_n": every_n != 1,
        "offload": offload is not False,
        "layers": layers is not None,
        "budget": budget is not None,
    }
    beside = ["every_n", "offload", "layers", "budget"] if plan is not None else []
    if budget is not None:
        read_budget(budget)
        beside += ["every_n"]
    for name in beside:
        if given[name]:
            word = "budget" if plan is None else "plan"
            raise ValueError(
                f"{word}= and {name}= are both given, and {word}= chooses what happens to each "
                f"block; drop one of the two"
            )


def _apply(
    module: nn.Module,
    blocks: Sequence[Block],
    plan: Plan,
    config: OffloadConfig | None,
    is_steady: bool = False,
) -> Handle:
    refuse_checkpointed(module, blocks)
    refuse_nested(blocks)
    offloader = make_offloader(config, module, is_steady) if config else None
    if config is not None and nothing_to_move(config):
        plan = replace(
            plan,
            notes=(
                *plan.notes,
                "offload: there is no accelerator, every tensor is on the host already and there "
                "is nothing to move",
            ),
        )
    handle = Handle(plan, [block.module for block in blocks], offloader)
    try:
        put_plan_in_force(handle, module)
    except BaseException:
        handle.remove()
        raise
    return handle
