"""Make a model follow a plan, and undo it."""

import difflib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn

from lightning_ckpt.core import _transformers
from lightning_ckpt.core._torch import checkpointed_by_torch
from lightning_ckpt.core.blocks import Block, select_blocks
from lightning_ckpt.core.budget import read_budget
from lightning_ckpt.core.offload import (
    OffloadConfig,
    Offloader,
    make_offloader,
    nothing_to_move,
    put_in_force,
    read_offload,
)
from lightning_ckpt.core.plan import (
    Action,
    BlockPlan,
    Plan,
    PlanLike,
    check_every_n,
    every_n_plan,
    read_plan,
)
from lightning_ckpt.core.swap import swap_in, swap_out

logger = logging.getLogger("lightning_ckpt")


class _Entry(NamedTuple):
    """What one handle says of a block. A model and its handle may be dropped with the plan in
    force, so nothing here keeps either alive."""

    handle: "ref[Handle]"
    action: Action
    offloader: Offloader | None  # that moves what it saves, or only follows it
    moves: bool

    @property
    def is_in_force(self) -> bool:
        return self.action != "keep" or self.offloader is not None


# What each block is told, oldest first: the newest rules. Kept here, not on the modules, so that
# copies know nothing of it.
_told: WeakKeyDictionary[nn.Module, list[_Entry]] = WeakKeyDictionary()


class Handle:
    """A plan in force. Undo it by `remove()`, or use it as a context manager.

    Attributes:
        plan: what was applied, block by block.
        offloader: what moves saved tensors, None if they stay on the device. Its `report()` says
            what was moved.
    """

    def __init__(
        self, plan: Plan, blocks: Sequence[nn.Module], offloader: Offloader | None = None
    ) -> None:
        self.plan = plan
        self.offloader = offloader
        self._blocks = list(blocks)
        self._undo: list[Callable[[], None]] = []
        self._classes: set[type] = set()  # kept alive, or `change` would make them anew each time

    def change(self, plan: Plan) -> None:
        """Do something else with the same blocks from now on: for plans that follow the batches, at
        a few microseconds for each block whose action is another.

        Graphs that were made before stay valid.

        Args:
            plan: of the same blocks in the same order. It is not checked against the model again.

        Raises:
            ValueError: the plan has other blocks, or offloads where this handle has no offload.
        """
        if plan is self.plan:
            return
        if [block.name for block in plan] != [block.name for block in self.plan]:
            raise ValueError("the plan is of other blocks than the one in force; apply it anew")
        if plan.offload and self.offloader is None:
            raise ValueError(f"nothing is in force that offloads to {plan.offload}; apply it anew")
        before, self.plan = self.plan, plan
        for block, old, new in zip(self._blocks, before, plan, strict=False):
            told = _entry_of(self, plan, new)
            if told != _entry_of(self, before, old):
                entries = _told[block]
                entries[:] = [told if entry.handle() is self else entry for entry in entries]
                _obey(block)
                self._classes.add(type(block))

    def remove(self) -> None:
        """Leave the model as it was before this plan; a second call does nothing.

        Graphs that were made meanwhile stay valid. Where several plans are in force on one model
        the newest rules, and they may be removed in any order.
        """
        heir = self._heir()
        for block in self._blocks:
            entries = _told.get(block, [])
            entries[:] = [entry for entry in entries if entry.handle() is not self]
            _obey(block)
        undo, self._undo, self._blocks = self._undo, [], []
        self._classes.clear()
        if heir is not None:
            heir._undo[:0] = undo  # still needed: run last, when nothing is in force any more
            return
        for step in reversed(undo):
            step()

    def _heir(self) -> "Handle | None":
        """Another live handle on the same blocks, if any."""
        others = (e.handle() for block in self._blocks for e in _told.get(block, []))
        return next((handle for handle in others if handle not in (None, self)), None)

    @property
    def modules(self) -> list[nn.Module]:
        """The blocks themselves, in the plan's order; none after removal."""
        return list(self._blocks)

    @property
    def offloaded_bytes(self) -> int:
        """Bytes that were moved out to the offload target since the plan was put in force."""
        return 0 if self.offloader is None else self.offloader.out_bytes

    def __enter__(self) -> "Handle":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()

    def __repr__(self) -> str:
        state = "in force" if self._blocks else "removed"
        return f"<Handle: {self.plan.num_recomputed} of {len(self.plan)} blocks, {state}>"


def handles_in_force(module: nn.Module) -> list[Handle]:
    """The handles that rule blocks inside `module`, each once, in the order of its modules."""
    newest = (_told[part][-1].handle() for part in module.modules() if _told.get(part))
    return list(dict.fromkeys(handle for handle in newest if handle is not None))


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
    places = {block.offload for block in plan if block.offload}
    if len(places) > 1:
        raise ValueError(f"plan offloads to {' and '.join(sorted(places))}; choose one place")
    if config is None and places:
        config = OffloadConfig(target=places.pop(), scope="all")
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


def named_blocks(root: nn.Module, plan: Plan) -> list[Block]:
    """The modules that `plan` names, in its order."""
    modules = dict(root.named_modules(remove_duplicate=False))
    blocks = []
    for entry in plan:
        module = modules.get(entry.name) if entry.name else None
        if module is None:
            near = difflib.get_close_matches(entry.name, modules, n=3)
            raise ValueError(
                f"plan names block {entry.name!r}, which {type(root).__name__} does not have; "
                f"nearest: {', '.join(map(repr, near)) or 'none'}"
            )
        if entry.class_name not in ("", type(module).__name__):
            raise ValueError(
                f"plan was made for another model: block {entry.name!r} is a "
                f"{entry.class_name} there, and here a {type(module).__name__}"
            )
        blocks.append(Block(entry.name, module))
    _refuse_overlap(blocks)
    return blocks


def _refuse_overlap(blocks: Sequence[Block]) -> None:
    inside = {
        id(part): b.name for b in blocks for part in b.module.modules() if part is not b.module
    }
    for index, block in enumerate(blocks):
        twin = next((b.name for b in blocks[:index] if b.module is block.module), None)
        outer = inside.get(id(block.module), twin)
        if outer is not None:
            raise ValueError(
                f"plan names block {block.name!r}, which is, or lies in, its block {outer!r} and "
                "would be computed thrice; keep one of the two"
            )


def _apply(
    module: nn.Module,
    blocks: Sequence[Block],
    plan: Plan,
    config: OffloadConfig | None,
    is_steady: bool = False,
) -> Handle:
    _refuse_checkpointed(module, blocks)
    _refuse_nested(blocks)
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
        _put_in_force(handle, module)
    except BaseException:
        handle.remove()
        raise
    return handle


def _put_in_force(handle: Handle, root: nn.Module) -> None:
    undo, notes = _transformers.take_over_switches(root, handle._blocks)
    handle._undo.append(undo)
    plan = handle.plan
    handle.plan = replace(plan, notes=plan.notes + tuple(notes))
    for block, block_plan in zip(handle._blocks, plan, strict=True):
        _told.setdefault(block, []).append(_entry_of(handle, plan, block_plan))
        _obey(block)


def _entry_of(handle: Handle, plan: Plan, block: BlockPlan) -> _Entry:
    """What a handle says of a block under a plan: an offload by plan follows all blocks."""
    offloader, moves = handle.offloader, block.offload is not None
    if offloader is not None and not moves and not (offloader.is_steady and plan.offload):
        offloader = None
    return _Entry(ref(handle), block.action, offloader, moves and offloader is not None)


def _obey(block: nn.Module) -> None:
    """Give `block` the class that its newest entry asks for."""
    swap_out(block)
    put_in_force(block, None)
    entries = _told.get(block)
    if not entries:
        _told.pop(block, None)
    elif (newest := entries[-1]).is_in_force:
        put_in_force(block, newest.offloader, newest.moves)
        swap_in(block, newest.action, newest.moves)


def _refuse_nested(blocks: Sequence[Block]) -> None:
    """Refuse blocks inside, or around, the blocks of another plan: the inner would run thrice."""
    others = [other for other, entries in _told.items() if entries[-1].is_in_force]
    around = {id(part): other for other in others for part in other.modules()}
    for block in blocks:
        inside = next((p for p in block.module.modules() if id(p) in around), block.module)
        other = around.get(id(inside), block.module)
        if other is not block.module:
            raise ValueError(
                f"block {block.name!r} nests with a {type(other).__name__} that another plan in "
                "force recomputes; remove that plan first"
            )


def _refuse_torchscript(block: Block) -> None:
    """Refuse what Python cannot exchange the forward of, or replay the state of."""
    scripted = [m for m in block.module.modules() if isinstance(m, torch.jit.ScriptModule)]
    if block.module in scripted or any(next(m.buffers(), None) is not None for m in scripted):
        raise ValueError(
            f"block {block.name!r} is a TorchScript module, or has one with buffers in it, whose "
            "state cannot be replayed; apply before torch.jit.script, or name other blocks by "
            "`layers=`"
        )


def _refuse_checkpointed(root: nn.Module, blocks: Sequence[Block]) -> None:
    """Refuse blocks that are, or stand inside, a module which torch checkpoints: they would be
    computed three times."""
    outer = {
        name: api for name, module in root.named_modules() if (api := checkpointed_by_torch(module))
    }
    for block in blocks:
        _refuse_torchscript(block)
        for name, api in outer.items():
            if name == "" or block.name == name or block.name.startswith(f"{name}."):
                raise ValueError(
                    f"block {block.name!r} is checkpointed already, by {api} on {name!r}; remove "
                    "that, or name other blocks by `layers=`"
                )
