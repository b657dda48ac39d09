"""Find the stacks of repeated blocks in a model, as a person would who reads its code."""

from collections import Counter
from itertools import pairwise
from typing import NamedTuple

from torch import nn

from lightning_ckpt.core import _transformers
from lightning_ckpt.core.looks import (
    ANY,
    BLOCK,
    CONTAINERS,
    NO_NORM,
    group_of,
    has_attention,
    has_parameters,
    ids,
    ingredients,
    is_attention,
    is_composite,
    is_sequential,
    one_level,
    outermost,
    parts,
    tier_of,
    unwrapped,
    written_class,
)


def find_stacks(root: nn.Module, names: dict[int, str]) -> list[nn.Module]:
    """Blocks of the Transformers models in `root` by their own rules, of the rest by ours.

    Args:
        root: the model.
        names: qualified names of its modules, by `id`.

    Returns:
        Modules in no particular order, none inside another; none at all if nothing repeats.
    """
    marked = one_level([m for m in _transformers.checkpointing_layers(root) if m is not root])
    chosen = [block for layer in marked for block in _inside_stage(layer)]
    models = _transformers.outermost_models(root)
    hidden = ids(chosen) | {i for model in models for i in ids(parts(model))}
    for model in models:
        if not ids(chosen) & ids(parts(model)):
            chosen += _of_transformers_model(model, names)
    candidates = [c for c in _candidates(root, names) if id(c.module) not in hidden]
    # Beside blocks that we are sure of, a loosely built module is rather a head than a tower.
    loosest = NO_NORM if chosen else ANY
    chosen += _repeated(root, _without_holders(candidates, chosen), loosest)
    chosen += _of_bare_towers(root, candidates, chosen)
    return chosen


def _inside_stage(layer: nn.Module) -> list[nn.Module]:
    """The blocks of a stage, where Transformers marks whole stages (`Swinv2Stage`) as layers; a
    layer, and a stage that is made otherwise, is returned itself."""
    if not written_class(layer).__name__.endswith("Stage"):
        return [layer]
    stacks = [child for child in layer.children() if isinstance(child, CONTAINERS)]
    inner = [unwrapped(block) for stack in stacks for block in stack.children()]
    return [block for block in inner if is_composite(block) and has_parameters(block)] or [layer]


def _of_transformers_model(model: nn.Module, names: dict[int, str]) -> list[nn.Module]:
    """Blocks of a Transformers model without `GradientCheckpointingLayer`s (custom code, timm)."""
    candidates = _candidates(model, names)
    listed = _transformers.no_split_names(model)
    # The lists are written for device placement: they name embeddings, stages and convolutions too,
    # and sometimes not every class of a mixed stack.
    known = [c for c in candidates if written_class(c.module).__name__ in listed]
    blocks = _with_siblings([c for c in known if c.tier < ANY], candidates)
    return one_level([c.module for c in blocks]) or _repeated(model, candidates, ANY)


def _of_bare_towers(
    root: nn.Module, candidates: list["Candidate"], chosen: list[nn.Module]
) -> list[nn.Module]:
    """Blocks of the direct children that got none because another child's look more like blocks."""
    found: list[nn.Module] = []
    for tower in root.children() if chosen else ():
        inside = ids(parts(tower))
        if isinstance(tower, CONTAINERS) or inside & ids(chosen):
            continue
        found += _repeated(tower, [c for c in candidates if id(c.module) in inside], NO_NORM)
    return found


class Candidate(NamedTuple):
    """A child of a container that could be a block."""

    module: nn.Module
    container: nn.Module
    group: object  # what counts as "the same class"
    tier: int
    alone: bool  # the only child of its container


def _candidates(root: nn.Module, names: dict[int, str]) -> list[Candidate]:
    """All non-leaf children with parameters of `root`'s containers, in order, each once."""
    found: dict[int, Candidate] = {}
    for container in (root, *parts(root)):
        if not isinstance(container, CONTAINERS):
            continue
        for child in container.children():
            module = unwrapped(child)
            if module is root or id(module) in found or not is_composite(module):
                continue
            tier = tier_of(module, names.get(id(container), ""))
            alone = len(container) == 1 and type(module) is not nn.Sequential
            found[id(module)] = Candidate(module, container, group_of(module, tier), tier, alone)
    return list(found.values())


def _repeated(root: nn.Module, candidates: list[Candidate], loosest: int) -> list[nn.Module]:
    """Repeated candidates of the best tier that has some, stages dropped for their contents."""
    for tier in range(BLOCK, loosest + 1):
        level = [c for c in candidates if c.tier == tier]
        if tier != BLOCK:
            level = _outside_blocks(root, level)
        counts = Counter(c.group for c in level)
        repeated = [c for c in level if counts[c.group] > 1 or (c.alone and tier == BLOCK)]
        repeated = _with_siblings(repeated, level)
        stages = {c.group for c in repeated if _is_stage(c, repeated)}
        if repeated:
            return outermost([c.module for c in repeated if c.group not in stages])
    single = [c.module for c in candidates if c.tier == BLOCK and not is_sequential(c.module)]
    return single if len(single) == 1 else []


def _with_siblings(blocks: list[Candidate], candidates: list[Candidate]) -> list[Candidate]:
    """`blocks` and the other candidates in the same `ModuleList`s (the one attention layer of a
    state-space model); a `Sequential` would have its stem and head taken along."""
    stacks = {id(c.container) for c in blocks if isinstance(c.container, nn.ModuleList)}
    known = {id(c.module) for c in blocks}
    return [
        c
        for c in candidates
        if id(c.module) in known or (c.tier < ANY and id(c.container) in stacks)
    ]


def _outside_blocks(root: nn.Module, level: list[Candidate]) -> list[Candidate]:
    """Drop what lies in a repeated block that is no child of a container (GoogLeNet's branches)."""
    counts = Counter(map(written_class, parts(root)))
    blocks = [
        m
        for m in parts(root)
        if counts[written_class(m)] > 1 and not isinstance(m, CONTAINERS) and tier_of(m) == BLOCK
    ]
    inside = {i for m in blocks for i in ids(parts(m))}
    return [c for c in level if id(c.module) not in inside]


def _is_stage(candidate: Candidate, level: list[Candidate]) -> bool:
    """Whether `candidate` is a sequence of blocks: it holds a stack of other candidates.

    Different parts under one class name (`Residual(attention)`, `Residual(mlp)`) make up a block.
    A block with attention of its own and repeated parts without any has experts in it.
    """
    inside = ids(candidate.module.modules())
    held = [c for c in level if id(c.container) in inside and c.group != candidate.group]
    apart = inside - {i for c in held for i in ids(c.module.modules())} - {id(candidate.module)}
    if any(is_attention(m) for m in candidate.module.modules() if id(m) in apart):
        held = [c for c in held if has_attention(c.module)]
    return any(_is_stack(c.container, held) for c in held)


def _is_stack(container: nn.Module, held: list[Candidate]) -> bool:
    """Whether the blocks in `container` are a stack: alone in it or repeated, and all alike."""
    members = [c for c in held if c.container is container]
    others = [m for m in container.children() if has_parameters(m)]
    counts = Counter(c.group for c in members)
    if len(members) < len(others) and max(counts.values()) == 1:
        return False
    return all(_are_alike([c.module for c in members if c.group == group]) for group in counts)


def _are_alike(modules: list[nn.Module]) -> bool:
    """Whether modules of one class are variants of one thing (a shortcut more), no unlike parts."""
    if len(set(map(has_attention, modules))) > 1:
        return False
    made_of = sorted(map(ingredients, modules), key=len)
    return all(less <= more for less, more in pairwise(made_of))


def _without_holders(candidates: list[Candidate], blocks: list[nn.Module]) -> list[Candidate]:
    """Drop candidates that hold one of `blocks`."""
    known = ids(blocks)
    return [c for c in candidates if not known & ids(c.module.modules())]
