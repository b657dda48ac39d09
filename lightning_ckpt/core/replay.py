"""Let a recompute see the state that its forward saw, and put everything back.

Note: [State is exchanged, not overwritten]
The recompute runs with other objects in the module's dictionaries. Writing the old values into the
real tensors would move their version counters, and other graphs that saved them would refuse to run
backward.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from operator import is_
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_ckpt.core._torch import tensor_version
from lightning_ckpt.core.arguments import identities
from lightning_ckpt.core.generators import (
    States,
    generators_in,
    get_state,
    is_same,
    set_state,
)

_ABSENT: Any = object()

Owner = dict[str, Any]  # a module's `__dict__`, `_buffers`, `_parameters` or `_modules`
Foreign = dict[int, set[str]]  # names by owner's id that a sharding engine manages: left alone


class Place(NamedTuple):
    """A tensor as it stood in its place before the forward."""

    owner: Owner
    name: str
    tensor: Tensor
    version: int
    requires_grad: bool


class Replay(NamedTuple):
    """What one forward saw of the state that can change, for the recomputes of that forward."""

    values: list[tuple[Owner, dict[str, Any]]]  # attributes, by reference
    opened: list[tuple[Owner, list[str]]]  # attributes that `build` makes from `tensors`
    build: Callable[[Sequence[Tensor]], Any]
    tensors: list[tuple[Tensor, int | None]]  # without graphs; version, None for a copy
    created: list[tuple[Owner, str]]  # what the forward made
    copies: list[tuple[Place, Tensor]]  # state tensors, as they were
    places: list[Place]  # tensors whose copy was not kept, right after the forward
    unknown: list[Place]  # large ones that moved before we knew that they do
    generators: States
    watched: list[tuple[Any, list[tuple[int, int]]]]  # arguments that we cannot copy
    foreign: Foreign


@contextmanager
def replayed(replay: Replay, modules: Sequence[nn.Module]) -> Iterator[None]:
    """Let the state be that of the forward, and put everything back afterwards.

    Args:
        replay: what the forward saw.
        modules: the block's, and those among its arguments.
    """
    now = [(owner, dict(owner)) for owner in owners_of(modules)]
    drawn = [generator for generator, _ in replay.generators]
    # The global ones in any case: a block may set one to a seed of its own, and leave it as it was.
    generators = [(generator, get_state(generator)) for generator in generators_in(drawn)]
    flags = [(place.tensor, place.tensor.requires_grad) for place in replay.places]
    exchanged: list[tuple[Owner, str, Any]] = []
    try:
        _exchange(replay, exchanged)
        yield
    finally:
        for owner, name, value in reversed(exchanged):
            _put(owner, name, value)
        for owner, values in now:
            _restore(owner, values, replay.foreign.get(id(owner), frozenset()))
        for tensor, flag in flags:
            _set_requires_grad(tensor, flag)
        for generator, state in generators:
            if not is_same(get_state(generator), state):
                set_state(generator, state)


def _restore(owner: Owner, values: dict[str, Any], passed: Set[str]) -> None:
    # Nothing to do, nearly always; by far the fastest way to see that.
    same_names = len(owner) == len(values) and all(map(is_, owner, values))
    if same_names and all(map(is_, owner.values(), values.values())):
        return
    for name in owner.keys() - values.keys() - passed:
        del owner[name]
    for name, value in values.items():
        if name not in passed and owner.get(name) is not value:
            owner[name] = value


def _exchange(replay: Replay, exchanged: list[tuple[Owner, str, Any]]) -> None:
    def put(owner: Owner, name: str, value: Any) -> None:
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
        if identities(other) != before:
            raise RuntimeError(
                f"an argument of a checkpointed {type(module).__name__}, an object of class "
                f"{type(other).__name__}, has other tensors in it than in the forward, so the "
                "block cannot be computed again; pass a new object to each block, or tensors"
            )


def owners_of(modules: Iterable[nn.Module]) -> list[Owner]:
    return [owner for child in modules for owner in (vars(child), child._buffers)]


def _put(owner: Owner, name: str, value: Any) -> None:
    if value is _ABSENT:
        owner.pop(name, None)
    else:
        owner[name] = value


def _set_requires_grad(tensor: Tensor, flag: bool) -> None:
    if tensor.requires_grad != flag and tensor.is_leaf:
        tensor.requires_grad_(flag)
