"""Which modules of a model are its blocks: by itself, or as `layers=` says.

Left alone, the choice is the one a person would make: the repeated layers of a stack. What they are
made of (the `Linear`s of an MLP, attention heads, experts) and what they make up (stages) are not.
"""

import difflib
import inspect
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, TypeAlias

from torch import nn

from lightning_ckpt.core.looks import (
    CONTAINERS,
    has_forward,
    is_composite,
    is_sequential,
    outermost,
    parts,
    tier_of,
    unwrapped,
    written_class,
)
from lightning_ckpt.core.stacks import find_stacks

Predicate: TypeAlias = Callable[[str, nn.Module], bool]
Entry: TypeAlias = "type[nn.Module] | str | Predicate"
Layers: TypeAlias = "Entry | Sequence[type[nn.Module] | str] | None"


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
    check_module(module)
    names = {id(m): name for name, m in module.named_modules()}
    chosen, notes = (find_stacks(module, names), ()) if layers is None else _named(module, layers)
    if not chosen:
        raise ValueError(_nothing_found(module))
    order = {key: index for index, key in enumerate(names)}
    unique = {id(m): m for m in chosen}.values()
    ordered = sorted(unique, key=lambda m: order[id(m)])
    return Selection([Block(names[id(m)], m) for m in ordered], notes)


def check_module(module: Any) -> None:
    """Refuse what is no model.

    Raises:
        TypeError: it is a class, a trainer, ...
    """
    if not isinstance(module, nn.Module):
        raise TypeError(
            f"module must be a torch.nn.Module, got {module!r}; pass the model with the blocks"
        )


def check_layers(layers: Layers) -> None:
    """Refuse what `layers` cannot be, before there is a model to look into.

    Raises:
        TypeError, ValueError: as `find_blocks`.
    """
    if layers is not None:
        _entries(layers)


def _named(root: nn.Module, layers: Any) -> tuple[list[nn.Module], tuple[str, ...]]:
    """What `layers` says, and a note where matches lie in other matches."""
    matches: list[nn.Module] = []
    for entry in _entries(layers):
        found = _matches(root, entry)
        # One pattern `layers.*` also matches all that lies in its own matches: nothing to tell.
        matches += outermost(found) if isinstance(entry, str) and "*" in entry else found
    unique = list({id(m): m for m in matches}.values())
    blocks = outermost(unique)
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
    if not isinstance(entry, (str, type)):
        _check_predicate(entry)


def _check_predicate(entry: Any) -> None:
    try:
        signature = inspect.signature(entry)
    except ValueError:  # some of those written in C do not say
        return
    try:
        signature.bind("name", None)
    except TypeError as error:
        raise TypeError(
            f"layers holds {entry!r}, which does not take (name, module): {error}; pass "
            "lambda name, module: isinstance(module, Block)"
        ) from None


FORMS = (
    "a module class, a class name or qualified name pattern such as 'Block' or 'encoder.layers.*', "
    "a sequence of these, or a predicate (name, module) -> bool"
)


def _matches(root: nn.Module, entry: Any) -> list[nn.Module]:
    """The modules inside `root` that one entry of `layers` means; at least one."""
    found = [m for name, m in root.named_modules() if m is not root and _fits(entry, name, m)]
    runnable = [unwrapped(m) for m in found if has_forward(m)]
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


def _nothing_found(root: nn.Module) -> str:
    seen = _seen(root)
    listed = ", ".join(f"{name} ({count})" for name, count in seen.items())
    example = next(iter(seen), "Block")
    return (
        f"no repeated blocks found in {type(root).__name__}, looked for children of one class in "
        f"ModuleList, Sequential and ModuleDict. Classes seen: {listed or 'none'}. "
        f"Name the blocks by class, layers={example!r}, or by place, layers='encoder.layers.*'"
    )


def _seen(root: nn.Module, limit: int = 10) -> dict[str, int]:
    """Names and counts of the classes in `root` that could be blocks, the likeliest first."""
    seen = [m for m in parts(root) if is_composite(m) and not is_sequential(m)]
    if len(set(map(written_class, seen))) == len(seen):  # the blocks may have no parameters
        seen += [m for m in parts(root) if m not in seen and not _is_torchs(m)]
    seen = seen or list(parts(root))  # single layers, if there is nothing else
    tiers = {written_class(m).__name__: tier_of(m) for m in seen}
    counts = Counter(written_class(m).__name__ for m in seen)
    likely = sorted(counts, key=lambda name: (counts[name] == 1, tiers[name], -counts[name]))
    return {name: counts[name] for name in likely[:limit]}


def _is_torchs(module: nn.Module) -> bool:
    return written_class(module).__module__.partition(".")[0] == "torch"


def _nearest(root: nn.Module, entry: Any) -> str:
    """What the user may have meant."""
    word = entry if isinstance(entry, str) else getattr(entry, "__name__", "")
    patterns = [f"{n}.*" for n, m in root.named_modules() if n and isinstance(m, CONTAINERS)]
    known = [*dict.fromkeys(type(m).__name__ for m in parts(root)), *patterns]
    near = (
        difflib.get_close_matches(word, known, n=5, cutoff=0.4) or list(_seen(root)) + patterns[:5]
    )
    return "nearest: " + (", ".join(map(repr, near)) or "none")
