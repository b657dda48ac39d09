"""Which modules of a model are its blocks: by itself, or as `layers=` says.

Left alone, the choice is the one a person would make: the repeated layers of a stack. What they are
made of (the `Linear`s of an MLP, attention heads, experts) and what they make up (stages) are not.
"""

import difflib
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_ckpt.core import _transformers

Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Entry: TypeAlias = "type[nn.Module] | str | Predicate"
Layers: TypeAlias = "Entry | Sequence[type[nn.Module] | str] | None"

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

# Children under which torch.compile, FSDP1 and checkpoint_wrapper keep the module that they wrap.
WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

# How much a candidate looks like a block; a tier is looked at where the one before gave nothing.
BLOCK, NO_NORM, ANY = 1, 2, 3


class Block(NamedTuple):
    """A module that is checkpointed or kept as a whole, and its fully qualified name."""

    name: str
    module: nn.Module


class Selection(NamedTuple):
    """The blocks of a model, and sentences for the user about how they were chosen."""

    blocks: list[Block]
    notes: tuple[str, ...] = ()


def find_blocks(module: nn.Module, layers: Layers = None) -> list[Block]:
    """List the blocks inside `module`, in the order of `module.modules()`; none lies in another.

    Args:
        module: the model. It is never a block itself.
        layers: None finds the repeated layers by itself. Else a module class, a class name
            ("Block"), a dotted class path ("torch.nn.TransformerEncoderLayer"), a pattern of
            qualified names ("encoder.layers.*"), a sequence of these, or a predicate
            `(name, module) -> bool`. Where matches nest, the outermost counts.

    Raises:
        TypeError: `layers` is or holds something else.
        ValueError: nothing was found, or an entry of `layers` matches nothing.
    """
    return select_blocks(module, layers).blocks


def select_blocks(module: nn.Module, layers: Layers = None) -> Selection:
    """`find_blocks`, with notes on what was passed over."""
    names = {id(m): name for name, m in module.named_modules()}
    chosen, notes = (_by_itself(module, names), ()) if layers is None else _named(module, layers)
    order = {key: index for index, key in enumerate(names)}
    unique = {id(m): m for m in chosen}.values()
    ordered = sorted(unique, key=lambda m: order[id(m)])
    return Selection([Block(names[id(m)], m) for m in ordered], notes)


# --- layers=None ---------------------------------------------------------------------------------


def _by_itself(root: nn.Module, names: dict[int, str]) -> list[nn.Module]:
    """Blocks of the Transformers models in `root` by their own rules, of the rest by ours."""
    chosen = _one_level([m for m in _transformers.checkpointing_layers(root) if m is not root])
    models = _transformers.outermost_models(root)
    hidden = _ids(chosen) | {i for model in models for i in _ids(_parts(model))}
    for model in models:
        if not _ids(chosen) & _ids(_parts(model)):
            chosen += _of_transformers_model(model, names)
    candidates = [c for c in _candidates(root, names) if id(c.module) not in hidden]
    # Beside blocks that we are sure of, a loosely built module is rather a head than a tower.
    loosest = NO_NORM if chosen else ANY
    chosen += _repeated(root, _without_holders(candidates, chosen), loosest)
    chosen += _of_bare_towers(root, candidates, chosen)
    if not chosen:
        raise ValueError(_nothing_found(root))
    return chosen


def _of_transformers_model(model: nn.Module, names: dict[int, str]) -> list[nn.Module]:
    """Blocks of a Transformers model without `GradientCheckpointingLayer`s (custom code, timm)."""
    candidates = _candidates(model, names)
    listed = _transformers.no_split_names(model)
    # The lists are written for device placement: they name embeddings, stages and convolutions too,
    # and sometimes not every class of a mixed stack.
    known = [c for c in candidates if _written_class(c.module).__name__ in listed]
    blocks = _with_siblings([c for c in known if c.tier < ANY], candidates)
    return _one_level([c.module for c in blocks]) or _repeated(model, candidates, ANY)


def _of_bare_towers(
    root: nn.Module, candidates: list["Candidate"], chosen: list[nn.Module]
) -> list[nn.Module]:
    """Blocks of the direct children that got none because another child's look more like blocks."""
    found: list[nn.Module] = []
    for tower in root.children() if chosen else ():
        inside = _ids(_parts(tower))
        if isinstance(tower, CONTAINERS) or inside & _ids(chosen):
            continue
        found += _repeated(tower, [c for c in candidates if id(c.module) in inside], NO_NORM)
    return found


def check_layers(layers: Layers) -> None:
    """Refuse what `layers` cannot be, before there is a model to look into.

    Raises:
        TypeError, ValueError: as `find_blocks`.
    """
    if layers is not None:
        _entries(layers)


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
    for container in (root, *_parts(root)):
        if not isinstance(container, CONTAINERS):
            continue
        for child in container.children():
            module = _unwrapped(child)
            if module is root or id(module) in found or not _is_composite(module):
                continue
            tier = _tier(module, names.get(id(container), ""))
            alone = len(container) == 1 and type(module) is not nn.Sequential
            found[id(module)] = Candidate(module, container, _group(module, tier), tier, alone)
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
            return _outermost([c.module for c in repeated if c.group not in stages])
    single = [c.module for c in candidates if c.tier == BLOCK and not _is_plain(c.module)]
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
    counts = Counter(map(_written_class, _parts(root)))
    blocks = [
        m
        for m in _parts(root)
        if counts[_written_class(m)] > 1 and not isinstance(m, CONTAINERS) and _tier(m) == BLOCK
    ]
    inside = {i for m in blocks for i in _ids(_parts(m))}
    return [c for c in level if id(c.module) not in inside]


def _is_stage(candidate: Candidate, level: list[Candidate]) -> bool:
    """Whether `candidate` is a sequence of blocks: it holds a stack of other candidates.

    Different parts under one class name (`Residual(attention)`, `Residual(mlp)`) make up a block.
    A block with attention of its own and repeated parts without any has experts in it.
    """
    inside = _ids(candidate.module.modules())
    held = [c for c in level if id(c.container) in inside and c.group != candidate.group]
    apart = inside - {i for c in held for i in _ids(c.module.modules())} - {id(candidate.module)}
    if any(_is_attention(m) for m in candidate.module.modules() if id(m) in apart):
        held = [c for c in held if _has_attention(c.module)]
    return any(_is_stack(c.container, held) for c in held)


def _is_stack(container: nn.Module, held: list[Candidate]) -> bool:
    """Whether the blocks in `container` are a stack: alone in it or repeated, and all alike."""
    members = [c for c in held if c.container is container]
    others = [m for m in container.children() if _has_parameters(m)]
    counts = Counter(c.group for c in members)
    if len(members) < len(others) and max(counts.values()) == 1:
        return False
    return all(_are_alike([c.module for c in members if c.group == group]) for group in counts)


def _are_alike(modules: list[nn.Module]) -> bool:
    """Whether modules of one class are variants of one thing (a shortcut more), no unlike parts."""
    if len(set(map(_has_attention, modules))) > 1:
        return False
    made_of = sorted(map(_ingredients, modules), key=len)
    return all(less <= more for less, more in pairwise(made_of))


def _without_holders(candidates: list[Candidate], blocks: list[nn.Module]) -> list[Candidate]:
    """Drop candidates that hold one of `blocks`."""
    known = _ids(blocks)
    return [c for c in candidates if not known & _ids(c.module.modules())]


# --- what a module looks like --------------------------------------------------------------------


def _parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside `module`, without what `torch.nn.utils.parametrize` keeps there."""
    for name, child in module.named_children():
        if name != "parametrizations":
            yield child
            yield from _parts(child)


def _ids(modules: Iterable[nn.Module]) -> set[int]:
    return set(map(id, modules))


def _unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's, FSDP1's and checkpoint_wrapper's wrappers."""
    while inner := next((m for n, m in module.named_children() if n in WRAPPED), None):
        module = inner
    return module


def _written_class(module: nn.Module) -> type:
    """The class that somebody wrote, under those that were laid over it.

    FSDP2 lays `FSDPBlock` over `Block`, parametrizations a class for each instance, and a
    checkpointed block has a class of the same name and module.
    """
    cls = type(module)
    while base := next((b for b in cls.__bases__ if _is_laid_over(cls, b)), None):
        cls = base
    return cls


def _is_laid_over(cls: type, base: type) -> bool:
    same = (cls.__name__, cls.__module__) == (base.__name__, base.__module__)
    return same or cls.__name__ in (f"FSDP{base.__name__}", f"Parametrized{base.__name__}")


def _is_plain(module: nn.Module) -> bool:
    return _written_class(module) is nn.Sequential


def _group(module: nn.Module, tier: int) -> object:
    """What counts as one class: `Sequential`s by what they hold, everything else by class."""
    if not _is_plain(module):
        return _written_class(module)
    return frozenset(_written_class(m) for m in module.children() if _has_parameters(m)), tier


def _has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def _is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name


def _has_attention(module: nn.Module) -> bool:
    return any(map(_is_attention, module.modules()))


def _num_own_weights(module: nn.Module) -> int:
    """How many matrices `module` itself holds; a torch layer is one operation, a RNN several."""
    own = sum(is_lazy(p) or p.dim() > 1 for p in module.parameters(recurse=False))
    own += "parametrizations" in dict(module.named_children())
    is_layer = _written_class(module).__module__.startswith("torch.nn.")
    return min(own, 1) if is_layer and not isinstance(module, nn.RNNBase) else own


def _is_composite(module: nn.Module) -> bool:
    """Whether `module` can be run, has parameters and is more than one operation."""
    if not (_has_forward(module) and _has_parameters(module)):
        return False
    return next(_parts(module), None) is not None or _num_own_weights(module) > 1


def _is_norm(module: nn.Module) -> bool:
    """A normalisation, by name or because it only scales and shifts (`Affine`)."""
    own = list(module.parameters(recurse=False))
    is_leaf = next(_parts(module), None) is None
    if "norm" in type(module).__name__.lower() and (own or is_leaf):
        return True
    scales = own and not any(is_lazy(p) or p.dim() > 1 for p in own)
    return bool(scales) and is_leaf and not isinstance(module, nn.PReLU)


# Children under such names are parts of a block, or none, whatever they look like; so are layers
# that are a convolution with its norm and activation.
_PART_NAMES = re.compile("expert|head|embed", re.IGNORECASE)
_CONV_LAYER = re.compile(r"Conv\dd|Conv(Norm|B[Nn])")


def _tier(module: nn.Module, container: str = "") -> int:
    """How much `module` looks like a block; experts, heads, embeddings are parts."""
    last = container.rpartition(".")[2]
    if _PART_NAMES.search(last) or _CONV_LAYER.search(type(module).__name__):
        return ANY
    if sum(map(_num_own_weights, (module, *_parts(module)))) < 2:
        return ANY
    return BLOCK if any(map(_is_norm, _parts(module))) else NO_NORM


def _ingredients(module: nn.Module) -> frozenset[type]:
    """The classes with parameters that `module` is built of, containers left out."""
    return frozenset(
        _written_class(m)
        for m in _parts(module)
        if _has_parameters(m) and not isinstance(m, CONTAINERS)
    )


def _one_level(modules: list[nn.Module]) -> list[nn.Module]:
    """Of listed blocks that nest, the contents where a stage holds a stack of them (Swin), the
    holder where one block is a part of another (Zamba)."""
    listed = _ids(modules)
    stages = [m for m in modules if any(_ids(c.children()) & listed for c in _containers_in(m))]
    return _outermost([m for m in modules if id(m) not in _ids(stages)])


def _containers_in(module: nn.Module) -> Iterator[nn.Module]:
    return (m for m in _parts(module) if isinstance(m, CONTAINERS))


def _outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inside = {i for m in modules for i in _ids(m.modules()) - {id(m)}}
    return [m for m in modules if id(m) not in inside]


# --- layers= -------------------------------------------------------------------------------------


def _named(root: nn.Module, layers: Any) -> tuple[list[nn.Module], tuple[str, ...]]:
    """What `layers` says, and a note where matches lie in other matches."""
    matches: list[nn.Module] = []
    for entry in _entries(layers):
        found = _matches(root, entry)
        # One pattern `layers.*` also matches all that lies in its own matches: nothing to tell.
        matches += _outermost(found) if isinstance(entry, str) and "*" in entry else found
    unique = list({id(m): m for m in matches}.values())
    blocks = _outermost(unique)
    return blocks, _note_passed_over(unique, blocks)


def _entries(layers: Any) -> list[Any]:
    """`layers` as a list of classes, strings and predicates, checked."""
    single = isinstance(layers, str) or callable(layers)  # a class, a predicate; a module too
    if not single and not isinstance(layers, Sequence):
        raise TypeError(f"layers must be {FORMS}, got {layers!r}")
    entries = [layers] if single else list(layers)
    if not entries:
        raise ValueError(
            f"layers={layers!r} is empty; pass None to let blocks be found, or {FORMS}"
        )
    for entry in entries:
        _check(entry)
    return entries


def _check(entry: Any) -> None:
    if isinstance(entry, nn.Module):
        raise TypeError(
            f"layers holds a module, {type(entry).__name__}; pass its class, its name, or "
            "lambda name, module: module is ..."
        )
    if isinstance(entry, type) and not issubclass(entry, nn.Module):
        raise TypeError(f"layers holds {entry!r}, which is no subclass of torch.nn.Module")
    if not (isinstance(entry, str) or callable(entry)):
        raise TypeError(f"layers holds {entry!r}; it must be {FORMS}")
    if isinstance(entry, str) and not entry.strip():
        raise ValueError(f"layers holds an empty string ({entry!r}); it must be {FORMS}")


FORMS = (
    "a module class, a class name or qualified name pattern such as 'Block' or 'encoder.layers.*', "
    "a sequence of these, or a predicate (name, module) -> bool"
)


def _matches(root: nn.Module, entry: Any) -> list[nn.Module]:
    """The modules inside `root` that one entry of `layers` means; at least one."""
    found = [m for name, m in root.named_modules() if m is not root and _fits(entry, name, m)]
    runnable = [_unwrapped(m) for m in found if _has_forward(m)]
    if runnable:
        return runnable
    if not found:
        shown = entry.__name__ if isinstance(entry, type) else repr(entry)
        where = type(root).__name__
        raise ValueError(f"layers={shown} matches nothing in {where}; {_nearest(root, entry)}")
    name = next(name for name, m in root.named_modules() if m is found[0])
    raise ValueError(
        f"layers={entry!r} matches {name!r}, a {type(found[0]).__name__}, which has no forward of "
        f"its own; did you mean '{name}.*'?"
    )


def _fits(entry: Any, name: str, module: nn.Module) -> bool:
    if isinstance(entry, type):
        return isinstance(module, entry)
    if not isinstance(entry, str):
        return bool(entry(name, module))
    return fnmatchcase(name, entry) or _is_class_called(type(module), entry)


def _is_class_called(cls: type, name: str) -> bool:
    """Whether `name` is the class or a base of it: bare, by its dotted path, or as re-exported."""
    bases = [b for b in cls.__mro__ if issubclass(b, nn.Module) and b is not nn.Module]
    if "." not in name:
        return any(b.__name__ == name for b in bases)
    package, _, attribute = name.rpartition(".")
    exported = getattr(sys.modules.get(package), attribute, None)
    return any(b is exported or f"{b.__module__}.{b.__qualname__}" == name for b in bases)


def _note_passed_over(matches: list[nn.Module], blocks: list[nn.Module]) -> tuple[str, ...]:
    outer = {id(part): block for block in blocks for part in block.modules() if part is not block}
    nested = Counter(
        (type(m).__name__, type(outer[id(m)]).__name__) for m in matches if id(m) in outer
    )
    return tuple(
        f"{count} {inner} matched by layers= inside {around} passed over: the outermost counts"
        for (inner, around), count in nested.items()
    )


# --- messages ------------------------------------------------------------------------------------


def _nothing_found(root: nn.Module) -> str:
    seen = _seen(root)
    listed = ", ".join(f"{name} ({count})" for name, count in seen.items())
    example = next(iter(seen), "Block")
    return (
        f"no repeated blocks found in {type(root).__name__}, looked for children of one class in "
        f"ModuleList, Sequential and ModuleDict. Classes seen: {listed or 'only single layers'}. "
        f"Name the blocks by class, layers={example!r}, or by place, layers='encoder.layers.*'"
    )


def _seen(root: nn.Module, limit: int = 10) -> dict[str, int]:
    """Names and counts of the classes in `root` that could be blocks, the likeliest first."""
    parts = [m for m in _parts(root) if _is_composite(m) and not _is_plain(m)]
    tiers = {_written_class(m).__name__: _tier(m) for m in parts}
    counts = Counter(_written_class(m).__name__ for m in parts)
    likely = sorted(counts, key=lambda name: (counts[name] == 1, tiers[name], -counts[name]))
    return {name: counts[name] for name in likely[:limit]}


def _nearest(root: nn.Module, entry: Any) -> str:
    """What the user may have meant."""
    word = entry if isinstance(entry, str) else getattr(entry, "__name__", "")
    patterns = [f"{n}.*" for n, m in root.named_modules() if n and isinstance(m, CONTAINERS)]
    known = [*dict.fromkeys(type(m).__name__ for m in _parts(root)), *patterns]
    near = (
        difflib.get_close_matches(word, known, n=5, cutoff=0.4) or list(_seen(root)) + patterns[:5]
    )
    return "nearest: " + (", ".join(map(repr, near)) or "none")
