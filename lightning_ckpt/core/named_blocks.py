"""Which modules of a model a plan names, and which no plan can take."""

import difflib
from collections.abc import Sequence

import torch
from torch import nn

from lightning_ckpt.core._torch import checkpointed_by_torch
from lightning_ckpt.core.blocks import Block
from lightning_ckpt.core.plan import Plan


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


def _refuse_torchscript(block: Block) -> None:
    """Refuse what Python cannot exchange the forward of, or replay the state of."""
    scripted = [m for m in block.module.modules() if isinstance(m, torch.jit.ScriptModule)]
    if block.module in scripted or any(next(m.buffers(), None) is not None for m in scripted):
        raise ValueError(
            f"block {block.name!r} is a TorchScript module, or has one with buffers in it, whose "
            "state cannot be replayed; apply before torch.jit.script, or name other blocks by "
            "`layers=`"
        )


def refuse_checkpointed(root: nn.Module, blocks: Sequence[Block]) -> None:
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
