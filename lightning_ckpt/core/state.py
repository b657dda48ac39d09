"""What a block's forward changes beside its result, so that a recompute changes it no second time.

Torch replays its own generators and autocast. A block may also change buffers (BatchNorm
statistics, spectral norm vectors, codebooks, expert loads), attributes (counters, cached tensors)
and the streams of Python's `random` and NumPy's global generator. The recompute must see all of
these as the forward saw them, and leave them as it found them.

Note: [How a change is seen]
Autograd's version counter is not enough: BatchNorm's kernel and everything done through `.data`
leave it alone. So each state tensor is copied before the forward and compared with its copy
afterwards; only a tensor that did change keeps its copy until backward. Comparing on an accelerator
makes the host wait, so small copies are kept there without asking, and a moved version counter
answers first.

Note: [State is exchanged, not overwritten]
The recompute runs with other tensor objects in the module's dictionaries. Writing the old values
into the real tensors would move their version counters, and other graphs that saved them would
refuse to run backward.
"""

import random
import sys
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ckpt.core._torch import is_fake, tensor_version

_SMALL_BYTES = 64 * 1024
_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype})
_CONTAINERS = frozenset({list, dict, set, deque, OrderedDict, defaultdict, Counter})
_INTERNALS = frozenset(vars(nn.Module())) - {"training"}

_Owner = dict[str, Any]  # a module's `__dict__` or `_buffers`


class _StateTensor(NamedTuple):
    """A buffer or tensor attribute as it stood before the forward."""

    owner: _Owner
    key: str
    tensor: Tensor
    version: int
    copy: Tensor


class Replay(NamedTuple):
    """What one forward saw of the state that can change, for the recomputes of that forward."""

    values: list[tuple[_Owner, dict[str, Any]]]  # plain attributes, by name
    created: list[tuple[_Owner, str]]  # attributes that the forward made
    contents: list[tuple[Any, Any]]  # containers that the forward changed, and their copies
    tensors: list[tuple[_Owner, str, Tensor]]
    versions: list[tuple[Tensor, int]]  # of parameters, right after the forward
    random: Any  # None: the forward drew nothing
    numpy: Any


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
        self._tensors = [
            _StateTensor(owner, key, value, tensor_version(value), value.detach().clone())
            for owner in self._owners
            for key, value in owner.items()
            if _is_state(value)
        ]
        self._parameters = list(module.parameters())
        self._random = random.getstate()
        self._numpy = _numpy_state()

    def settle(self) -> Replay:
        """Compare with the state now; what did not change is let go."""
        return Replay(
            values=self._values,
            created=[
                (owner, name)
                for owner, names in zip(self._owners, self._names, strict=True)
                for name in owner.keys() - names
            ],
            contents=[pair for pair in self._contents if not _same_contents(*pair)],
            tensors=[
                (state.owner, state.key, state.copy if changed else state.tensor)
                for state in self._tensors
                if (changed := _is_changed(state)) or state.owner.get(state.key) is not state.tensor
            ],
            versions=[(parameter, tensor_version(parameter)) for parameter in self._parameters],
            random=None if random.getstate() == self._random else self._random,
            numpy=None if _same_numpy_state(_numpy_state(), self._numpy) else self._numpy,
        )


@contextmanager
def replayed(replay: Replay, module: nn.Module) -> Iterator[None]:
    """Let the state be that of the forward, and put everything back afterwards.

    Raises:
        RuntimeError: a parameter was changed in place after the forward, so that the recompute
            would use other values (autograd raises the same for tensors that it saved itself).
    """
    _check_parameters(replay, module)
    now = [(owner, dict(owner)) for owner in _owners(module)]
    contents = [(container, container.copy()) for container, _ in replay.contents]
    # Where the forward drew nothing the recompute draws nothing, and asking costs time.
    now_random = None if replay.random is None else random.getstate()
    now_numpy = None if replay.numpy is None else _numpy_state()
    try:
        _exchange(replay)
        yield
    finally:
        for owner, values in now:
            for name in owner.keys() - values.keys():
                del owner[name]
            for name, value in values.items():
                if owner.get(name) is not value:
                    owner[name] = value
        for container, content in contents:
            _refill(container, content)
        _set_generators(now_random, now_numpy)


def _owners(module: nn.Module) -> list[_Owner]:
    return [owner for child in module.modules() for owner in (vars(child), child._buffers)]


def _exchange(replay: Replay) -> None:
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
        owner[name] = made.setdefault(id(tensor), tensor.clone())
    _set_generators(replay.random, replay.numpy)


def _set_generators(random_state: Any, numpy_state: Any) -> None:
    if random_state is not None:
        random.setstate(random_state)
    if numpy_state is not None:
        sys.modules["numpy"].random.set_state(numpy_state)


def _check_parameters(replay: Replay, module: nn.Module) -> None:
    for parameter, version in replay.versions:
        if tensor_version(parameter) != version:
            name = next((n for n, p in module.named_parameters() if p is parameter), "?")
            raise RuntimeError(
                f"parameter {name!r} of a checkpointed {type(module).__name__} was modified by an "
                "inplace operation between forward and backward, so the block cannot be computed "
                "again with the values that the forward used; change it after backward (an "
                "optimizer step belongs there), or keep this block's activations by `layers=`"
            )


def _plain_values(owner: _Owner) -> dict[str, Any]:
    """Attributes whose old value can be kept: holding tensors with a graph would leak memory."""
    return {
        name: value
        for name, value in owner.items()
        if name not in _INTERNALS and (type(value) in _PLAIN or type(value) in _CONTAINERS)
    }


def _is_state(value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and not isinstance(value, nn.Parameter)
        and not value.requires_grad
        and not is_fake(value)
    )


def _is_changed(state: _StateTensor) -> bool:
    """Note: [How a change is seen]."""
    tensor, copy = state.tensor, state.copy
    if tensor_version(tensor) != state.version or tensor.shape != copy.shape:
        return True
    if tensor.device.type != "cpu" and copy.nbytes <= _SMALL_BYTES:
        return True
    return not torch.equal(tensor, copy)


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


def _numpy_state() -> Any:
    numpy = sys.modules.get("numpy")  # a block cannot draw from what nobody imported
    return None if numpy is None else numpy.random.get_state(legacy=False)


def _same_numpy_state(now: Any, before: Any) -> bool:
    if now is None or before is None:
        return now is before
    if now.keys() != before.keys():
        return False
    return all(
        _same_numpy_state(value, before[key])
        if isinstance(value, dict)
        else bool((value == before[key]).all())
        if hasattr(value, "all")
        else value == before[key]
        for key, value in now.items()
    )
