"""Everything that names Hugging Face Transformers (4.57 to 5.24); without it, all is idle here.

A model can hold Transformers classes only if somebody imported them, so we look into `sys.modules`
and never import the library ourselves.
"""

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def _class_of(submodule: str, name: str) -> type | None:
    """The class `name` of an already imported `transformers.<submodule>`, or None."""
    return getattr(sys.modules.get(f"transformers.{submodule}"), name, None)


def outermost_models(root: nn.Module) -> list[nn.Module]:
    """The `PreTrainedModel`s in `root` (or `root` itself) that lie in no other one."""
    base = _class_of("modeling_utils", "PreTrainedModel")
    if base is None:
        return []
    found: list[nn.Module] = []
    inside: set[int] = set()
    for module in root.modules():
        if isinstance(module, base) and id(module) not in inside:
            found.append(module)
            inside.update(map(id, module.modules()))
    return found


def checkpointing_layers(root: nn.Module) -> list[nn.Module]:
    """The `GradientCheckpointingLayer`s in `root`, nested ones too."""
    base = _class_of("modeling_layers", "GradientCheckpointingLayer")
    return [module for module in root.modules() if base is not None and isinstance(module, base)]


def no_split_names(model: nn.Module) -> set[str]:
    """Class names in the `_no_split_modules` of the models in `model` (blocks, also embeddings)."""
    return {
        name
        for module in model.modules()
        for name in (getattr(type(module), "_no_split_modules", None) or ())
    }


# --- the library's own switch ------------------------------------------------------------------

_ABSENT: Any = object()
_SWITCH = ("gradient_checkpointing", "_gradient_checkpointing_func")
# What the library is given where it checkpoints something on its own: non-reentrant, and picklable.
_CHECKPOINT = functools.partial(checkpoint, use_reentrant=False)


def take_over_switches(
    root: nn.Module, blocks: Sequence[nn.Module]
) -> tuple[Callable[[], None], tuple[str, ...]]:
    """Leave the checkpointing of `blocks` to us and to nobody else.

    The library's switch is turned off for the blocks, for what lies in them and for what holds
    them (`SwinStage` would recompute its `SwinLayer`s once more; a `LlamaModel` whose switch is on
    returns no cache and logs a warning). Modules elsewhere that checkpoint parts of themselves and
    are no layers to be counted are turned on, in the non-reentrant form. Layers that are not among
    the blocks stay as they are.

    Args:
        root: the module that the blocks were found in.
        blocks: all of them, the kept ones too.

    Returns:
        A function that gives every switch back (those that the user turned meanwhile stay), and
        sentences for the user.
    """
    layer = _class_of("modeling_layers", "GradientCheckpointingLayer")
    ours = set(map(id, blocks))
    inside = {id(part) for block in blocks for part in block.modules()}
    undo: list[Callable[[], None]] = []
    num_taken = num_left = 0
    for module in _with_switch(root):
        is_on = bool(module.gradient_checkpointing)
        num_taken += is_on and id(module) in ours
        if id(module) in inside or any(id(part) in ours for part in module.modules()):
            undo += [_set(module, "gradient_checkpointing", False)] if is_on else []
        elif (layer is not None and isinstance(module, layer)) or _calls_torch(module):
            num_left += is_on
        else:
            undo.append(_set(module, "_gradient_checkpointing_func", _CHECKPOINT))
            undo.append(_set(module, "gradient_checkpointing", True))
    return functools.partial(_run_all, undo), _switch_notes(num_taken, num_left)


def _switch_notes(num_taken: int, num_left: int) -> tuple[str, ...]:
    notes = []
    if num_taken:
        notes.append(
            f"gradient_checkpointing was on for {num_taken} blocks: taken over, "
            "given back at removal"
        )
    if num_left:
        notes.append(
            f"gradient_checkpointing stays on for {num_left} modules that are no blocks here"
        )
    return tuple(notes)


def _with_switch(root: nn.Module) -> Iterator[nn.Module]:
    """The modules of Transformers models in `root` that have a `gradient_checkpointing` switch."""
    layer = _class_of("modeling_layers", "GradientCheckpointingLayer")
    models = {id(part) for model in outermost_models(root) for part in model.modules()}
    for module in root.modules():
        known = id(module) in models or (layer is not None and isinstance(module, layer))
        if known and isinstance(getattr(module, "gradient_checkpointing", None), bool):
            yield module


def _calls_torch(module: nn.Module) -> bool:
    """Whether `module` calls torch's `checkpoint` itself, so that we have no say in how it does.

    Those that do (Grounding DINO's decoder, CLVP's encoder) get the reentrant form and its warning.
    """
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return code is not None and "checkpoint" in code.co_names


def _set(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Set an attribute; returns what restores it."""
    before = vars(module).get(name, _ABSENT)
    setattr(module, name, value)
    return functools.partial(_give_back, module, name, value, before)


def _give_back(module: nn.Module, name: str, ours: Any, before: Any) -> None:
    if vars(module).get(name, _ABSENT) is not ours:
        return  # the user has set it meanwhile
    if before is _ABSENT:
        delattr(module, name)
    else:
        setattr(module, name, before)


def _run_all(steps: list[Callable[[], None]]) -> None:
    while steps:
        steps.pop()()


def already_checkpointing(block: nn.Module) -> bool:
    """Whether the library is checkpointing this very call, its switch turned on after us.

    Up to Transformers 4 the layer does it in `__call__`, around our `forward`. In 5 it does it in
    the layer's own `forward`, and only where that is the class's; ours is, so it steps aside.
    """
    layer = _class_of("modeling_layers", "GradientCheckpointingLayer")
    return (
        layer is not None
        and "__call__" in vars(layer)
        and isinstance(block, layer)
        and bool(block.gradient_checkpointing)
        and block.training
    )


# --- caches --------------------------------------------------------------------------------------

# Names under which layers take their cache, which may be a legacy tuple.
_CACHE_NAMES = frozenset(
    ("cache", "cache_params", "layer_past", "past_key_value", "past_key_values")
)


def without_caches(
    block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of `block`, the key-value caches among them taken out.

    The recompute would write to them a second time. Training does not read what it writes there,
    and what the model returns keeps its shape: the model makes the cache, not the layers. Where
    there is a cache `use_cache` is turned off too, as the library does in its layers; older ones
    have none, return their keys with `use_cache`, and their model expects them, so there it stays.

    Args:
        block: the block, one of Transformers (`is_of_library`).
        args: positional arguments (GPT-2 passes its cache so).
        kwargs: keyword arguments (Llama does).

    Raises:
        ValueError: a cache has something in it that the block would read.
    """
    named = [name for name, value in kwargs.items() if _is_cache(value, name)]
    if not named and not any(map(_is_cache, args)):
        return args, kwargs
    dropped: dict[str, Any] = {}
    layer = _class_of("modeling_layers", "GradientCheckpointingLayer")
    if kwargs.get("use_cache") and layer is not None and isinstance(block, layer):
        dropped["use_cache"] = False
    if not getattr(block, "_can_checkpoint_with_cache", False):  # unless it only reads
        for value in (*args, *(kwargs[name] for name in named)):
            _refuse_used(value, block, kwargs)
        args = tuple(None if _is_cache(value) else value for value in args)
        dropped.update(dict.fromkeys(named))
    return args, {**kwargs, **dropped}


def is_of_library(cls: type) -> bool:
    """Whether `cls` is of the library, of custom code that it loaded, or made from such a class."""
    return any(
        c.__module__.startswith(("transformers.", "transformers_modules.")) for c in cls.__mro__
    )


def _is_cache(value: Any, name: str = "") -> bool:
    """Whether `value`, an argument called `name`, is a cache; some models have their own."""
    if value is None or name in _CACHE_NAMES:
        return value is not None
    cls = type(value)
    base = _class_of("cache_utils", "Cache")
    if base is not None and issubclass(cls, base):
        return True
    return cls.__name__.endswith("Cache") and cls.__module__.startswith("transformers.")


def _refuse_used(cache: Any, block: nn.Module, kwargs: dict[str, Any]) -> None:
    """Refuse a cache without which `block` would compute something else."""
    base = _class_of("cache_utils", "Cache")
    if base is None or not isinstance(cache, base):
        return
    # Looped models (Dory, HRM) give each pass through a layer a place of its own in the cache.
    offset = sum(kwargs.get(name) or 0 for name in ("cache_offset", "cycle_offset"))
    for part in block.modules():
        if getattr(part, "kv_shared_layer_index", None) is not None:
            raise ValueError(
                f"past_key_values: {type(block).__name__} reads the keys of another layer from the "
                "cache, and a checkpointed layer has none; pass use_cache=False to the model"
            )
        # The attention's index, not the block's: a block with two of them counts twice as fast.
        index = getattr(part, "layer_idx", None) if part is not block else None
        if isinstance(index, int) and _num_cached(cache, index + offset) > 0:
            raise ValueError(
                f"past_key_values: the cache given to a {type(block).__name__} is not empty "
                "(prefix tuning, or a text in pieces), and a checkpointed layer cannot read it; "
                "pass none, or leave these blocks out by `layers=`"
            )


def _num_cached(cache: Any, layer: int) -> int:
    try:
        return cache.get_seq_length(layer)
    except ValueError:  # not an attention layer
        return 0
