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
wait). Large tensors can be most of a model: they are copied in the first few calls, and from then
on only if they moved in one of them; the others are held by reference, and may not be changed in
place before backward.

Note: [State is exchanged, not overwritten]
The recompute runs with other objects in the module's dictionaries. Writing the old values into the
real tensors would move their version counters, and other graphs that saved them would refuse to run
backward.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from lightning_ckpt.core._torch import is_fake, tensor_version
from lightning_ckpt.core.arguments import flatten, is_open
from lightning_ckpt.core.generators import States, generators_in, get_state, is_same, set_state

_SMALL_BYTES = 64 * 1024
_NUM_CALLS_WATCHED = 4
_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
_ABSENT: Any = object()

_Owner = dict[str, Any]  # a module's `__dict__`, `_buffers`, `_parameters` or `_modules`

# How often a large tensor was seen not to move in its block's forward; -1: it does move.
_calm: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _Place(NamedTuple):
    """A tensor as it stood in its place before the forward."""

    owner: _Owner
    name: str
    tensor: Tensor
    version: int
    requires_grad: bool


class Replay(NamedTuple):
    """What one forward saw of the state that can change, for the recomputes of that forward."""

    values: list[tuple[_Owner, dict[str, Any]]]  # attributes, by reference
    opened: list[tuple[_Owner, list[str]]]  # attributes that `build` makes from `tensors`
    build: Callable[[Sequence[Tensor]], Any]
    tensors: list[tuple[Tensor, int | None]]  # without graphs; version, None for a copy
    created: list[tuple[_Owner, str]]  # what the forward made
    copies: list[tuple[_Place, Tensor]]  # state tensors, as they were
    places: list[_Place]  # tensors whose copy was not kept, right after the forward
    unknown: list[_Place]  # large ones that moved before we knew that they do
    generators: States
    watched: list[tuple[Any, list[tuple[int, int]]]]  # arguments that we cannot copy


class Before:
    """State of a block right before its forward; `settle()` right after it says what changed.

    Args:
        module: the block.
        others: objects among the arguments: modules whose state counts too, generators, and
            objects that are watched because they cannot be copied.
    """

    def __init__(self, module: nn.Module, others: Sequence[Any]) -> None:
        given = [other for other in others if isinstance(other, nn.Module)]
        self.modules = _python_modules((module, *given))
        owners = _owners(self.modules)
        self._names = [(owner, set(owner)) for owner in (*owners, *_registries(self.modules))]
        attributes = [(owner, *_attributes(owner)) for owner in owners]
        self._values = [(owner, values) for owner, values, _ in attributes]
        self._opened = [(owner, opened) for owner, _, opened in attributes if opened]
        flat = flatten([list(values.values()) for _, values in self._opened])
        self._build = flat.build
        self._state = [_kept(tensor) for tensor in flat.tensors]
        self._held = list(_state_tensors(owners))
        self._parameters = _parameters(self.modules)
        self._copies = [
            (place, place.tensor.detach().clone())
            for place in (*self._held, *self._parameters)
            if _may_move(place)
        ]
        objects = [*others, *flat.others, *(v for _, vs in self._values for v in vs.values())]
        self._generators = [(g, get_state(g)) for g in generators_in(objects)]
        self._watched = [(other, _identities(other)) for other in others if _is_opaque(other)]

    def settle(self) -> Replay:
        """Compare with the state now; what did not change is let go where it is large."""
        changed = {id(place) for place, copy in self._copies if _is_changed(place, copy)}
        unknown = self._learn(changed)
        kept = [(p, copy) for p, copy in self._copies if id(p) in changed or _is_small(p.tensor)]
        known = {id(place) for place, _ in kept} | {id(place) for place in unknown}
        places = [*self._held, *self._parameters]
        return Replay(
            values=self._values,
            opened=[(owner, list(values)) for owner, values in self._opened],
            build=self._build,
            tensors=self._state,
            created=[(owner, n) for owner, names in self._names for n in owner.keys() - names],
            copies=kept,
            places=[_as_now(place) for place in places if id(place) not in known],
            unknown=unknown,
            generators=[(g, s) for g, s in self._generators if not is_same(get_state(g), s)],
            watched=self._watched,
        )

    def _learn(self, changed: set[int]) -> list[_Place]:
        """Note which tensors move; returns those that did without our having a copy."""
        copied = {id(place) for place, _ in self._copies}
        unknown = []
        for place in (*self._held, *self._parameters):
            if id(place) in copied:
                if _is_small(place.tensor) and not isinstance(place.tensor, nn.Parameter):
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


@contextmanager
def replayed(replay: Replay, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let the state be that of the forward, and put everything back afterwards.

    Args:
        replay: what the forward saw.
        modules: the block's, and those among its arguments.
    """
    now = [(owner, dict(owner)) for owner in _owners(modules)]
    generators = [(generator, get_state(generator)) for generator, _ in replay.generators]
    flags = [(place.tensor, place.tensor.requires_grad) for place in replay.places]
    exchanged: list[tuple[_Owner, str, Any]] = []
    try:
        _exchange(replay, exchanged)
        yield
    finally:
        for owner, name, value in reversed(exchanged):
            _put(owner, name, value)
        for owner, values in now:
            for name in owner.keys() - values.keys():
                del owner[name]
            for name, value in values.items():
                if owner.get(name) is not value:
                    owner[name] = value
        for tensor, flag in flags:
            _set_requires_grad(tensor, flag)
        for generator, state in generators:
            set_state(generator, state)


def _exchange(replay: Replay, exchanged: list[tuple[_Owner, str, Any]]) -> None:
    def put(owner: _Owner, name: str, value: Any) -> None:
        if owner.get(name, _ABSENT) is not value:
            exchanged.append((owner, name, owner.get(name, _ABSENT)))
            _put(owner, name, value)

    for owner, name in replay.created:
        put(owner, name, _ABSENT)
    for owner, values in replay.values:
        for name, value in values.items():
            put(owner, name, value)
    opened = replay.build([t.clone() if v is None else t for t, v in replay.tensors])
    for (owner, names), rebuilt in zip(replay.opened, opened, strict=True):
        for name, value in zip(names, rebuilt, strict=True):
            put(owner, name, value)
    made: dict[int, Tensor] = {}
    for place, tensor in (*replay.copies, *((place, place.tensor) for place in replay.unknown)):
        # Cloned at each recompute, since it will be changed again; one object stays one object.
        if id(place.tensor) not in made:
            clone = tensor.detach().clone().requires_grad_(place.requires_grad)
            made[id(place.tensor)] = clone
        put(place.owner, place.name, made[id(place.tensor)])
    for place in replay.places:
        _set_requires_grad(place.tensor, place.requires_grad)
        # Lent by `torch.func.functional_call`, or re-bound. What FSDP2 has exchanged for a
        # gathered tensor must stay: that is no DTensor, while what stood there was.
        if not isinstance(place.tensor, DTensor):
            put(place.owner, place.name, place.tensor)
    for generator, state in replay.generators:
        set_state(generator, state)


def check_unchanged(replay: Replay, module: nn.Module) -> None:
    """Make sure that a recompute of `module` would use the values of the forward.

    Raises:
        RuntimeError: something was changed in place after the forward (autograd raises the same
            for tensors that it saved itself).
    """
    held = [(place.name, place.tensor, place.version) for place in replay.places]
    held += [("an attribute", t, version) for t, version in replay.tensors if version is not None]
    for name, tensor, version in held:
        if tensor_version(tensor) != version:
            raise RuntimeError(
                f"{name!r} of a checkpointed {type(module).__name__} was modified by an inplace "
                "operation between forward and backward, so the block cannot be computed again "
                "with the values that the forward used; change it after backward (an optimizer "
                "step belongs there), or keep this block's activations by `layers=`"
            )
    for other, before in replay.watched:
        if _identities(other) != before:
            raise RuntimeError(
                f"an argument of a checkpointed {type(module).__name__}, an object of class "
                f"{type(other).__name__}, has other tensors in it than in the forward, so the "
                "block cannot be computed again; pass a new object to each block, or tensors"
            )


def _owners(modules: Iterable[nn.Module]) -> list[_Owner]:
    return [owner for child in modules for owner in (vars(child), child._buffers)]


def _python_modules(roots: Iterable[nn.Module]) -> list[nn.Module]:
    """All modules in `roots` whose state lies in Python; that of TorchScript does not."""
    found = dict.fromkeys(module for root in roots for module in root.modules())
    return [module for module in found if not isinstance(module, torch.jit.ScriptModule)]


def _registries(modules: Iterable[nn.Module]) -> list[_Owner]:
    return [owner for child in modules for owner in (child._parameters, child._modules)]


def _attributes(owner: _Owner) -> tuple[dict[str, Any], dict[str, Any]]:
    """Attributes to keep by reference, and those to look into; without module internals, state
    tensors, and objects that hold on to a graph."""
    values: dict[str, Any] = {}
    opened: dict[str, Any] = {}
    for name, value in owner.items():
        if name in _INTERNALS or _is_state(value):
            continue
        if _is_opened(value):
            opened[name] = value
        elif not _holds_graph(value):
            values[name] = value
    return values, opened


def _holds_graph(value: Any) -> bool:
    if isinstance(value, Tensor) or not _is_opaque(value):
        return False
    return any(tensor.requires_grad for tensor in _tensors_inside(value))


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


def _state_tensors(owners: list[_Owner]) -> Iterator[_Place]:
    for owner in owners:
        for name, value in owner.items():
            if _is_state(value) and not is_fake(value):
                yield _place(owner, name, value)


def _parameters(modules: Iterable[nn.Module]) -> list[_Place]:
    return [
        _place(child._parameters, name, parameter)
        for child in modules
        for name, parameter in child._parameters.items()
        if parameter is not None and not is_fake(parameter)
    ]


def _place(owner: _Owner, name: str, tensor: Tensor) -> _Place:
    return _Place(owner, name, tensor, tensor_version(tensor), tensor.requires_grad)


def _as_now(place: _Place) -> _Place:
    return place._replace(version=tensor_version(place.tensor))


def _may_move(place: _Place) -> bool:
    """Whether `place` has to be copied: it is small state, or large and not known to stay."""
    tensor, calm = place.tensor, _calm.get(place.tensor, 0)
    if calm < 0:
        return True
    if not isinstance(tensor, nn.Parameter) and _is_small(tensor):
        return True
    plain = type(tensor) in (nn.Parameter, Tensor)  # others may not copy as expected
    return plain and not tensor.requires_grad and tensor.is_leaf and calm < _NUM_CALLS_WATCHED


def _is_changed(place: _Place, copy: Tensor) -> bool:
    """Note: [What is kept until backward]."""
    tensor = place.tensor
    if tensor_version(tensor) != place.version:
        return True
    if not _is_comparable(tensor):
        return False
    if _is_small(tensor) and not isinstance(tensor, nn.Parameter):
        return False  # kept in any case
    return tensor.shape != copy.shape or not torch.equal(tensor, copy)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= _SMALL_BYTES


def _is_comparable(tensor: Tensor) -> bool:
    """Sparse, nested and MKL-DNN tensors have only their version counter to go by."""
    return tensor.layout == torch.strided and not tensor.is_nested


def _is_opaque(value: Any) -> bool:
    """An object with contents that we cannot copy for the recompute."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, nn.Module)


def _identities(value: Any) -> list[tuple[int, int]]:
    return [(id(tensor), tensor_version(tensor)) for tensor in _tensors_inside(value)]


def _tensors_inside(value: Any, depth: int = 3) -> list[Tensor]:
    """The tensors in an object's attributes, some levels deep."""
    if isinstance(value, Tensor):
        return [value]
    inner: Iterable[Any] = ()
    if depth and isinstance(value, dict):
        inner = value.values()
    elif depth and isinstance(value, (list, tuple)):
        inner = value
    elif depth and _is_opaque(value):
        inner = vars(value).values()
    return [found for item in list(inner) for found in _tensors_inside(item, depth - 1)]


def _put(owner: _Owner, name: str, value: Any) -> None:
    if value is _ABSENT:
        owner.pop(name, None)
    else:
        owner[name] = value


def _set_requires_grad(tensor: Tensor, flag: bool) -> None:
    if tensor.requires_grad != flag and tensor.is_leaf:
        tensor.requires_grad_(flag)
