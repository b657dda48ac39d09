"""What a block's forward changes beside its result, so that a recompute changes it no second time.

Torch replays its own generators and autocast. A block may also change buffers (BatchNorm
statistics, spectral norm vectors, codebooks, expert loads), frozen parameters (momentum teachers),
attributes (counters, cached tensors) and other random streams. The recompute must see all of these
as the forward saw them, and leave them as it found them.

Note: [How a change is seen]
Autograd's version counter is not enough: BatchNorm's kernel and everything done through `.data`
leave it alone. So each state tensor is copied before the forward and compared with its copy
afterwards; only a tensor that did change keeps its copy until backward. Comparing on an accelerator
makes the host wait, so small copies are kept there without asking, and a moved version counter
answers first. Frozen parameters can be most of a model: they are copied in the first call alone,
and from then on only if they moved in it.

Note: [State is exchanged, not overwritten]
The recompute runs with other tensor objects in the module's dictionaries. Writing the old values
into the real tensors would move their version counters, and other graphs that saved them would
refuse to run backward.
"""

import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_ckpt.core._torch import is_fake, tensor_version
from lightning_ckpt.core.generators import Moved, generators_of, get_state, is_same, set_state

_SMALL_BYTES = 64 * 1024
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype})
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
_INTERNALS = frozenset(vars(nn.Module())) - {"training"}

_Owner = dict[str, Any]  # a module's `__dict__`, `_buffers` or `_parameters`

# Whether a frozen parameter is changed by its block's forward, learned in the first call.
_moves: WeakIdKeyDictionary = WeakIdKeyDictionary()


class _StateTensor(NamedTuple):
    """A buffer, tensor attribute or frozen parameter as it stood before the forward."""

    owner: _Owner
    name: str
    tensor: Tensor
    version: int
    copy: Tensor


class Replay(NamedTuple):
    """What one forward saw of the state that can change, for the recomputes of that forward."""

    values: list[tuple[_Owner, dict[str, Any]]]  # plain attributes, by name
    created: list[tuple[_Owner, str]]  # attributes that the forward made
    contents: list[tuple[Any, Any]]  # containers that the forward changed, and their copies
    tensors: list[tuple[_Owner, str, Tensor]]  # changed ones
    parameters: list[tuple[_Owner, str, Tensor, bool, int]]  # requires_grad; version after forward
    generators: Moved


class Before:
    """State of a block right before its forward; `settle()` right after it says what changed."""

    def __init__(self, module: nn.Module) -> None:
        self._owners = _owners(module)
        self._names = [set(owner) for owner in self._owners]
        self._values = [(owner, _plain_values(owner)) for owner in self._owners]
        self._contents = [
            (value, value.copy())
            for _, values in self._values
            for value in values.values()
            if type(value) in _CONTAINERS
        ]
        self._parameters = _parameters(module)
        self._versions = [tensor_version(tensor) for _, _, tensor in self._parameters]
        self._tensors = [
            _StateTensor(owner, name, value, tensor_version(value), value.detach().clone())
            for owner, name, value in [
                *_tensors(self._owners),
                *filter(_may_move, self._parameters),
            ]
        ]
        self._generators = [(g, get_state(g)) for g in generators_of(module)]

    def settle(self) -> Replay:
        """Compare with the state now; what did not change is let go."""
        changed = {id(state) for state in self._tensors if _is_changed(state)}
        self._learn_moves(changed)
        return Replay(
            values=self._values,
            created=[
                (owner, name)
                for owner, names in zip(self._owners, self._names, strict=True)
                for name in owner.keys() - names
            ],
            contents=[pair for pair in self._contents if not _same_contents(*pair)],
            tensors=[
                (state.owner, state.name, state.copy if id(state) in changed else state.tensor)
                for state in self._tensors
                if id(state) in changed or state.owner.get(state.name) is not state.tensor
            ],
            parameters=[
                (owner, name, tensor, tensor.requires_grad, tensor_version(tensor))
                for owner, name, tensor in self._parameters
                if not _moves.get(tensor, False)
            ],
            generators=[
                (g, state) for g, state in self._generators if not is_same(get_state(g), state)
            ],
        )

    def _learn_moves(self, changed: set[int]) -> None:
        for state in self._tensors:
            if isinstance(state.tensor, nn.Parameter):
                _moves[state.tensor] = id(state) in changed
        for (_, name, tensor), version in zip(self._parameters, self._versions, strict=True):
            if tensor_version(tensor) != version and not _moves.get(tensor, False):
                _moves[tensor] = not tensor.requires_grad
                warnings.warn(
                    f"parameter {name!r} was changed in place by the forward of its checkpointed "
                    "block, and its value before is not known: the recompute of this call sees the "
                    "changed value; keep state in buffers (register_buffer)",
                    stacklevel=2,
                )


@contextmanager
def replayed(replay: Replay, module: nn.Module) -> Iterator[None]:
    """Let the state be that of the forward, and put everything back afterwards.

    Raises:
        RuntimeError: a parameter was changed in place after the forward, so that the recompute
            would use other values (autograd raises the same for tensors that it saved itself).
    """
    _check_versions(replay, module)
    now = [(owner, dict(owner)) for owner in _owners(module)]
    contents = [(container, container.copy()) for container, _ in replay.contents]
    generators = [(generator, get_state(generator)) for generator, _ in replay.generators]
    flags = [(tensor, tensor.requires_grad) for _, _, tensor, _, _ in replay.parameters]
    exchanged: list[tuple[_Owner, str, Any]] = []
    try:
        _exchange(replay, exchanged)
        yield
    finally:
        for owner, values in now:
            for name in owner.keys() - values.keys():
                del owner[name]
            for name, value in values.items():
                if owner.get(name) is not value:
                    owner[name] = value
        for owner, name, value in reversed(exchanged):
            owner[name] = value
        for tensor, flag in flags:
            _set_requires_grad(tensor, flag)
        for container, content in contents:
            _refill(container, content)
        for generator, state in generators:
            set_state(generator, state)


def _exchange(replay: Replay, exchanged: list[tuple[_Owner, str, Any]]) -> None:
    """Put the forward's state in place; `exchanged` gets what it pushed out of `_parameters`."""

    def put(owner: _Owner, name: str, value: Any) -> None:
        exchanged.append((owner, name, owner.get(name)))
        owner[name] = value

    for owner, name in replay.created:
        owner.pop(name, None)
    for owner, values in replay.values:
        for name, value in values.items():
            if owner.get(name) is not value:
                owner[name] = value
    for container, content in replay.contents:
        _refill(container, content)
    made: dict[int, Tensor] = {}
    for owner, name, tensor in replay.tensors:
        # Cloned at each recompute, since it will be changed again; one object stays one object.
        put(owner, name, made.setdefault(id(tensor), tensor.clone()))
    for owner, name, tensor, requires_grad, _ in replay.parameters:
        _set_requires_grad(tensor, requires_grad)
        if owner.get(name) is not tensor:  # `torch.func.functional_call` had lent it
            put(owner, name, tensor)
    for generator, state in replay.generators:
        set_state(generator, state)


def _check_versions(replay: Replay, module: nn.Module) -> None:
    for _, name, parameter, _, version in replay.parameters:
        if tensor_version(parameter) != version:
            full_name = next((n for n, p in module.named_parameters() if p is parameter), name)
            raise RuntimeError(
                f"parameter {full_name!r} of a checkpointed {type(module).__name__} was modified "
                "by an inplace operation between forward and backward, so the block cannot be "
                "computed again with the values that the forward used; change it after backward "
                "(an optimizer step belongs there), or keep this block's activations by `layers=`"
            )


def _owners(module: nn.Module) -> list[_Owner]:
    return [owner for child in module.modules() for owner in (vars(child), child._buffers)]


def _plain_values(owner: _Owner) -> dict[str, Any]:
    """Attributes whose old value can be kept: holding tensors with a graph would leak memory."""
    return {
        name: value
        for name, value in owner.items()
        if name not in _INTERNALS and (type(value) in _PLAIN or type(value) in _CONTAINERS)
    }


def _tensors(owners: list[_Owner]) -> Iterator[tuple[_Owner, str, Tensor]]:
    for owner in owners:
        for name, value in owner.items():
            if isinstance(value, Tensor) and not value.requires_grad and not is_fake(value):
                yield owner, name, value


def _parameters(module: nn.Module) -> list[tuple[_Owner, str, Tensor]]:
    """Parameters of plain kinds. A sharded one (DTensor) stands in its place only while FSDP2 has
    not gathered it: exchanging that would undo the gathering."""
    return [
        (child._parameters, name, parameter)
        for child in module.modules()
        for name, parameter in child._parameters.items()
        if parameter is not None
        and type(parameter) in (nn.Parameter, Tensor)
        and not is_fake(parameter)
    ]


def _may_move(parameter: tuple[_Owner, str, Tensor]) -> bool:
    tensor = parameter[2]
    return not tensor.requires_grad and tensor.is_leaf and _moves.get(tensor, True)


def _is_changed(state: _StateTensor) -> bool:
    """Note: [How a change is seen]."""
    tensor, copy = state.tensor, state.copy
    if tensor_version(tensor) != state.version or tensor.shape != copy.shape:
        return True
    if tensor.device.type != "cpu" and copy.nbytes <= _SMALL_BYTES:
        return not isinstance(tensor, nn.Parameter) or not torch.equal(tensor, copy)
    return not torch.equal(tensor, copy)


def _set_requires_grad(tensor: Tensor, flag: bool) -> None:
    if tensor.requires_grad != flag and tensor.is_leaf:
        tensor.requires_grad_(flag)


def _same_contents(container: Any, copy: Any) -> bool:
    if isinstance(container, set):
        return bool(container == copy)
    if len(container) != len(copy):
        return False
    if isinstance(container, dict):
        return all(key in copy and copy[key] is value for key, value in container.items())
    return all(a is b for a, b in zip(container, copy, strict=True))


def _refill(container: Any, content: Any) -> None:
    container.clear()
    container.extend(content) if isinstance(container, (list, deque)) else container.update(content)
