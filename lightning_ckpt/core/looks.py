"""What a module looks like: a block, a part of one, a layer, a wrapper around something else."""

import re
from collections.abc import Iterable, Iterator

from torch import nn
from torch.nn.parameter import is_lazy

CONTAINERS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)

# Children under which torch.compile, FSDP1 and checkpoint_wrapper keep the module that they wrap.
WRAPPED = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")

# How much a candidate looks like a block; a tier is looked at where the one before gave nothing.
BLOCK, NO_NORM, ANY = 1, 2, 3


def parts(module: nn.Module) -> Iterator[nn.Module]:
    """The modules inside `module`, without what `torch.nn.utils.parametrize` keeps there."""
    for name, child in module.named_children():
        if name != "parametrizations":
            yield child
            yield from parts(child)


def ids(modules: Iterable[nn.Module]) -> set[int]:
    return set(map(id, modules))


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside torch.compile's, FSDP1's and checkpoint_wrapper's wrappers."""
    while inner := next((m for n, m in module.named_children() if n in WRAPPED), None):
        module = inner
    return module


def written_class(module: nn.Module) -> type:
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


def is_sequential(module: nn.Module) -> bool:
    return written_class(module) is nn.Sequential


def group_of(module: nn.Module, tier: int) -> object:
    """What counts as one class: `Sequential`s by what they hold, everything else by class."""
    if not is_sequential(module):
        return written_class(module)
    return frozenset(written_class(m) for m in module.children() if has_parameters(m)), tier


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_attention(module: nn.Module) -> bool:
    name = type(module).__name__.lower()
    return "attention" in name or "attn" in name


def has_attention(module: nn.Module) -> bool:
    return any(map(is_attention, module.modules()))


def _num_own_weights(module: nn.Module) -> int:
    """How many matrices `module` itself holds; a torch layer is one operation, a RNN several."""
    own = sum(is_lazy(p) or p.dim() > 1 for p in module.parameters(recurse=False))
    own += "parametrizations" in dict(module.named_children())
    is_layer = written_class(module).__module__.startswith("torch.nn.")
    return min(own, 1) if is_layer and not isinstance(module, nn.RNNBase) else own


def is_composite(module: nn.Module) -> bool:
    """Whether `module` can be run, has parameters and is more than one operation."""
    if not (has_forward(module) and has_parameters(module)):
        return False
    return next(parts(module), None) is not None or _num_own_weights(module) > 1


def _is_norm(module: nn.Module) -> bool:
    """A normalisation, by name or because it only scales and shifts (`Affine`)."""
    own = list(module.parameters(recurse=False))
    is_leaf = next(parts(module), None) is None
    if "norm" in type(module).__name__.lower() and (own or is_leaf):
        return True
    scales = own and not any(is_lazy(p) or p.dim() > 1 for p in own)
    return bool(scales) and is_leaf and not isinstance(module, nn.PReLU)


# Children under such names are parts of a block, or none, whatever they look like; so are layers
# that are a convolution with its norm and activation.
_PART_NAMES = re.compile("expert|head|embed", re.IGNORECASE)
_CONV_LAYER = re.compile(r"Conv\dd|Conv(Norm|B[Nn])")


def tier_of(module: nn.Module, container: str = "") -> int:
    """How much `module` looks like a block; experts, heads, embeddings are parts."""
    last = container.rpartition(".")[2]
    if _PART_NAMES.search(last) or _CONV_LAYER.search(type(module).__name__):
        return ANY
    if sum(map(_num_own_weights, (module, *parts(module)))) < 2:
        return ANY
    return BLOCK if any(map(_is_norm, parts(module))) else NO_NORM


def ingredients(module: nn.Module) -> frozenset[type]:
    """The classes with parameters that `module` is built of, containers left out."""
    return frozenset(
        written_class(m)
        for m in parts(module)
        if has_parameters(m) and not isinstance(m, CONTAINERS)
    )


def one_level(modules: list[nn.Module]) -> list[nn.Module]:
    """Of listed blocks that nest, the contents where a stage holds a stack of them (Swin), the
    holder where one block is a part of another (Zamba)."""
    listed = ids(modules)
    stages = [m for m in modules if any(ids(c.children()) & listed for c in containers_in(m))]
    return outermost([m for m in modules if id(m) not in ids(stages)])


def containers_in(module: nn.Module) -> Iterator[nn.Module]:
    return (m for m in parts(module) if isinstance(m, CONTAINERS))


def outermost(modules: list[nn.Module]) -> list[nn.Module]:
    inside = {i for m in modules for i in ids(m.modules()) - {id(m)}}
    return [m for m in modules if id(m) not in inside]
