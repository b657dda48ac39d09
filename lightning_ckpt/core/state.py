"""What a block's forward changes beside its result, so that a recompute changes it no second time.

Torch replays its own generators and autocast. A block may also change buffers (BatchNorm
statistics, spectral norm vectors, codebooks, expert loads), frozen parameters (momentum teachers),
attributes (counters, cached tensors) and other random streams. The recompute must see all of these
as the forward saw them, and leave them as it found them.

Note: [What is kept until backward]
Plain values and objects by reference, containers as copies; tensors with a graph (the state of a
recurrent block) without it, or graphs that no backward frees would hang on each other for ever.
State tensors (buffers, tensor attributes, frozen parameters) are copied before the forward and
compared afterwards: autograd's version counter alone is not enough, since BatchNorm's kernel and
everything done through `.data` leave it alone. Small copies are kept whatever they show, so that
others may change the tensor before backward (and since comparing on an accelerator makes the host
wait). Parameters, and large tensors, can be most of a model: they are copied in the first few
calls, and from then on only if they moved in one of them; the others are held by reference, and may
not be changed in place before backward. A parameter that is empty before or after the forward is
filled and emptied by a sharding engine (ZeRO-3), whose hooks know it by marks of their own and fill
it again in the recompute: it is held by reference too.

Note: [Names of FSDP]
A unit of FSDP (version 1) inside the block gathers and frees its parameters in the recompute too,
by hooks that move them between the dictionaries of its modules. It must find there what it left, so
the units and these names are passed over.
"""

import warnings
from collections.abc import Iterable, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_ckpt.core._torch import (
    FullyShardedDataParallel,
    fsdp_names,
    is_fake,
    tensor_version,
)
from lightning_ckpt.core.arguments import (
    PLAIN,
    flatten,
    identities,
    is_opaque,
    is_open,
    tensors_inside,
)
from lightning_ckpt.core.generators import generators_in, get_state, is_same
from lightning_ckpt.core.replay import Foreign, Owner, Place, Replay, owners_of

_SMALL_BYTES = 64 * 1024
_NUM_CALLS_WATCHED = 4
_INTERNALS = frozenset(vars(nn.Module())) - {"training"}

# How often a large tensor was seen not to move in its block's forward; -1: it does move.
_calm: WeakIdKeyDictionary = WeakIdKeyDictionary()


class Before:
    """State of a block right before its forward; `settle()` right after it says what changed.

    Args:
        module: the block.
        others: objects among the arguments: modules whose state counts too, generators, and
            objects that are watched because they cannot be copied.
    """

    def __init__(self, module: nn.Module, others: Sequence[Any]) -> None:
        given = [other for other in others if isinstance(other, nn.Module)]
        self.modules, self._foreign = _python_modules((module, *given))
        owners = owners_of(self.modules)
        self._names = [(owner, set(owner)) for owner in (*owners, *_registries(self.modules))]
        attributes = [(owner, *_attributes(owner, self._passed(owner))) for owner in owners]
        self._values = [(owner, values) for owner, values, _, _ in attributes]
        self._opened = [(owner, opened) for owner, _, opened, _ in attributes if opened]
        flat = flatten([list(values.values()) for _, values in self._opened])
        self._build = flat.build
        self._state = [_kept(tensor) for tensor in flat.tensors]
        self._held = [place for _, _, _, places in attributes for place in places]
        self._parameters = [
            p for p in _parameters(self.modules) if p.name not in self._passed(p.owner)
        ]
        self._copies = [
            (place, place.tensor.detach().clone())
            for place in (*self._held, *self._parameters)
            if _may_move(place)
        ]
        objects = [*others, *flat.others, *(v for _, vs in self._values for v in vs.values())]
        self._generators = [(g, get_state(g)) for g in generators_in(objects)]
        self._watched = [(other, identities(other)) for other in others if is_opaque(other)]

    def settle(self) -> Replay:
        """Compare with the state now; what did not change is let go where it is large."""
        changed = {id(place) for place, copy in self._copies if _is_changed(place, copy)}
        unknown = self._learn(changed)
        kept = [
            (place, copy)
            for place, copy in self._copies
            if id(place) in changed or _is_small_state(place.tensor)
        ]
        known = {id(place) for place, _ in kept} | {id(place) for place in unknown}
        places = [*self._held, *self._parameters]
        return Replay(
            values=self._values,
            opened=[(owner, list(values)) for owner, values in self._opened],
            build=self._build,
            tensors=self._state,
            created=[
                (owner, name)
                for owner, names in self._names
                for name in owner.keys() - names - self._passed(owner)
            ],
            copies=kept,
            places=[_as_now(place) for place in places if id(place) not in known],
            unknown=unknown,
            generators=[(g, s) for g, s in self._generators if not is_same(get_state(g), s)],
            watched=self._watched,
            foreign=self._foreign,
        )

    def _passed(self, owner: Owner) -> Set[str]:
        return self._foreign.get(id(owner), frozenset())

    def _learn(self, changed: set[int]) -> list[Place]:
        """Note which tensors move; returns those that did without our having a copy."""
        copied = {id(place) for place, _ in self._copies}
        unknown = []
        for place in (*self._held, *self._parameters):
            if id(place) in copied:
                if _is_small_state(place.tensor):
                    continue
                calm = _calm.get(place.tensor, 0)
                _calm[place.tensor] = -1 if id(place) in changed or calm < 0 else calm + 1
            elif tensor_version(place.tensor) != place.version:
                _calm[place.tensor] = -1
                unknown.append(place)
                _warn_of_move(place.name)
        return unknown


def _warn_of_move(name: str) -> None:
    warnings.warn(
        f"{name!r} was changed in place by the forward of its checkpointed block, and its value "
        "before is not known: the recompute of this call sees the changed value (from the next "
        "call on it is known); keep state that moves in small buffers",
        stacklevel=2,
    )


def _python_modules(roots: Iterable[nn.Module]) -> tuple[list[nn.Module], Foreign]:
    """All modules in `roots` whose state lies in Python (that of TorchScript does not), and the
    names in them that are not theirs. Note: [Names of FSDP]."""
    found = dict.fromkeys(module for root in roots for module in root.modules())
    foreign: dict[int, set[str]] = {}
    for module, name in fsdp_names(found):
        for owner in (vars(module), module._parameters):
            foreign.setdefault(id(owner), set()).add(name)
    others = (torch.jit.ScriptModule, FullyShardedDataParallel)
    return [module for module in found if not isinstance(module, others)], foreign


def _registries(modules: Iterable[nn.Module]) -> list[Owner]:
    return [owner for child in modules for owner in (child._parameters, child._modules)]


def _attributes(
    owner: Owner, passed: Set[str]
) -> tuple[dict[str, Any], dict[str, Any], list[Place]]:
    """Attributes to keep by reference, those to look into, and state tensors; without module
    internals, names `passed` over, and objects that hold on to a graph."""
    values: dict[str, Any] = {}
    opened: dict[str, Any] = {}
    state: list[Place] = []
    for name in owner.keys() - _INTERNALS - passed:
        value = owner[name]
        if type(value) in PLAIN:
            values[name] = value
        elif _is_state(value):
            if not is_fake(value):
                state.append(_place(owner, name, value))
        elif _is_opened(value):
            opened[name] = value
        elif not _holds_graph(value):
            values[name] = value
    return values, opened, state


def _holds_graph(value: Any) -> bool:
    if isinstance(value, Tensor) or not is_opaque(value):
        return False
    return any(tensor.requires_grad for tensor in tensors_inside(value))


def _is_opened(value: Any) -> bool:
    if isinstance(value, Tensor):
        return True  # with a graph
    # Configuration objects are often dataclasses: large, and not changed.
    return is_open(value) and not hasattr(value, "__dataclass_fields__")


def _kept(tensor: Tensor) -> tuple[Tensor, int | None]:
    """The same values as a leaf: the recompute needs values and flags, gradients flow elsewhere.
    What others may change in place is copied where it is small."""
    leaf = tensor.detach()
    if _is_small(tensor) and not tensor.requires_grad:
        return leaf.clone(), None
    return leaf.requires_grad_(tensor.requires_grad), tensor_version(tensor)


def _is_state(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.requires_grad


def _parameters(modules: Iterable[nn.Module]) -> list[Place]:
    return [
        _place(child._parameters, name, parameter)
        for child in modules
        for name, parameter in child._parameters.items()
        if parameter is not None and not is_fake(parameter)
    ]


def _place(owner: Owner, name: str, tensor: Tensor) -> Place:
    return Place(owner, name, tensor, tensor_version(tensor), tensor.requires_grad)


def _as_now(place: Place) -> Place:
    version = tensor_version(place.tensor)
    return place if version == place.version else place._replace(version=version)


def _may_move(place: Place) -> bool:
    """Whether `place` has to be copied: it is small state, or large and not known to stay."""
    tensor, calm = place.tensor, _calm.get(place.tensor, 0)
    if calm < 0 or _is_small_state(tensor):
        return True
    plain = type(tensor) in (nn.Parameter, Tensor)  # others may not copy as expected
    return plain and not tensor.requires_grad and tensor.is_leaf and calm < _NUM_CALLS_WATCHED


def _is_changed(place: Place, copy: Tensor) -> bool:
    """Note: [What is kept until backward]."""
    tensor = place.tensor
    if _is_emptied(tensor, copy):
        return False
    if tensor_version(tensor) != place.version:
        return True
    if not _is_comparable(tensor):
        return False
    if _is_small_state(tensor):
        return False  # kept in any case
    return tensor.shape != copy.shape or not torch.equal(tensor, copy)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _SMALL_BYTES


def _is_small_state(tensor: Tensor) -> bool:
    """Whether a copy of `tensor` is taken and kept at every call, without comparing."""
    return _is_small(tensor) and not isinstance(tensor, nn.Parameter)


def _is_emptied(tensor: Tensor, copy: Tensor) -> bool:
    """Whether `tensor` is a parameter that is empty now, or was when it was copied."""
    return isinstance(tensor, nn.Parameter) and 0 in (tensor.numel(), copy.numel())


def _is_comparable(tensor: Tensor) -> bool:
    """Sparse, nested and MKL-DNN tensors have only their version counter to go by."""
    return tensor.layout == torch.strided and not tensor.is_nested
