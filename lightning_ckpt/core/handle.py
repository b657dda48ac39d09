"""What each block is told, by all the handles on it, and how it is undone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import NamedTuple
from weakref import WeakKeyDictionary, ref

from torch import nn

from lightning_ckpt.core import _transformers
from lightning_ckpt.core.blocks import Block
from lightning_ckpt.core.offload import Offloader, put_in_force
from lightning_ckpt.core.plan import Action, BlockPlan, Plan
from lightning_ckpt.core.swap import swap_in, swap_out


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


def put_plan_in_force(handle: Handle, root: nn.Module) -> None:
    """Make the blocks inside `root` follow the plan of `handle`, with what comes with it."""
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


def refuse_nested(blocks: Sequence[Block]) -> None:
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
