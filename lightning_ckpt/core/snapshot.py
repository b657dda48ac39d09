"""All that can be reached from a module and may change in a step: to compare, and to put back.

Apart from `core.state` on purpose: that replays one block as fast as can be, and leaves out what it
cannot afford. This looks as far as it can, since it has to find what the other one missed.
"""

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ckpt.core._torch import is_fake
from lightning_ckpt.core.contents import CONTAINERS, contents, put_contents
from lightning_ckpt.core.generators import (
    generators_in,
    get_state,
    set_state,
    torch_generators,
)
from lightning_ckpt.core.sameness import (
    ABSENT,
    GeneratorState,
    is_array,
    is_equal,
    is_equal_tensor,
)

_DEPTH = 6  # levels of objects below a module; what lies deeper is a library's, not state
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
_CODE = (type, types.ModuleType, types.FunctionType, types.MethodType, types.BuiltinFunctionType)


class Snapshot:
    """State as it is now, copied: about as many bytes as the model has.

    What a module reaches only through closures, globals, class attributes or files is not in it.

    Args:
        roots: objects by name: a module, a batch.
        strangers: objects that are not looked into (a trainer that the module knows).
    """

    def __init__(self, roots: dict[str, Any], strangers: Iterable[Any] = ()) -> None:
        self._roots = roots
        self._strangers = list(strangers)
        reached = list(self._reach())
        self._copies = {path: _copy_of(value) for path, value in reached}
        self._steps = [_restorer(value, self._copies[path]) for path, value in reached]

    def restore(self) -> None:
        """Put everything back, in place: others may hold the same objects."""
        for step in reversed(self._steps):
            step()

    def changes(self) -> dict[str, Any]:
        """What is not as it was, by path: copies of what it is now, `ABSENT` where it is gone."""
        changed: dict[str, Any] = {}
        met = set()
        for path, value in self._reach():
            met.add(path)
            if not _is_as(self._copies.get(path, ABSENT), value):
                changed[path] = _copy_of(value)
        return changed | dict.fromkeys(self._copies.keys() - met, ABSENT)

    def _reach(self) -> Iterator[tuple[str, Any]]:
        known = {id(stranger): stranger for stranger in self._strangers}
        streams = {f"generator {_name(g)}": g for g in (*generators_in(()), *torch_generators())}
        for name, root in (streams | self._roots).items():
            yield from _reach(name, root, _DEPTH, known)


def _reach(path: str, value: Any, depth: int, known: dict[int, Any]) -> Iterator[tuple[str, Any]]:
    """`value` and what it holds, every object once (`known` keeps them alive, for their ids)."""
    if isinstance(value, _PLAIN):
        yield path, value
        return
    if depth < 0 or id(value) in known or (isinstance(value, _CODE) and not _is_stream(value)):
        return
    known[id(value)] = value
    yield path, value
    if _is_stream(value):
        return
    for name, item in _inside(value):
        deeper = _DEPTH if isinstance(item, nn.Module) else depth - 1
        yield from _reach(f"{path}{name}", item, deeper, known)


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Tensor):
        if value.is_leaf and value.grad is not None:
            yield ".grad", value.grad
        return
    if isinstance(value, nn.Module):
        for registry in _registries(value):
            yield from ((f".{name}", item) for name, item in list(registry.items()))
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", item) for key, item in list(value.items()))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{index}]", item) for index, item in enumerate(list(value)))
    if hasattr(value, "__dict__"):
        own = list(vars(value).items())
        yield from ((f".{name}", item) for name, item in own if name not in _REGISTRIES)


_REGISTRIES = ("_parameters", "_buffers", "_modules")


def _registries(module: nn.Module) -> list[dict[str, Any]]:
    return [vars(module)[name] for name in _REGISTRIES]


def _copy_of(value: Any) -> Any:
    if isinstance(value, Tensor):
        return None if is_fake(value) or is_lazy(value) else value.detach().clone()
    if _is_stream(value):
        return GeneratorState(get_state(value))
    if is_array(value):
        return value.copy()
    if isinstance(value, set):
        return {item for item in value if isinstance(item, _PLAIN)}
    if isinstance(value, _PLAIN):
        return value
    size = len(value) if isinstance(value, (*CONTAINERS, tuple)) else 0
    return f"a {type(value).__name__} of {size}"


def _is_as(copy: Any, value: Any) -> bool:
    """Whether `value` still is as `copy`, which was made of it."""
    if isinstance(copy, Tensor) and isinstance(value, Tensor):
        return not is_fake(value) and not is_lazy(value) and is_equal_tensor(copy, value)
    return is_equal(copy, _copy_of(value))


def _restorer(value: Any, copy: Any) -> Callable[[], None]:
    if isinstance(value, Tensor):
        return _tensor_restorer(value, copy)
    if isinstance(copy, GeneratorState):
        return functools.partial(set_state, value, copy.state)
    if is_array(value):
        return functools.partial(_put_array, value, copy)
    owners = [value] if isinstance(value, CONTAINERS) else []
    if hasattr(value, "__dict__"):
        owners.append(vars(value))
    if isinstance(value, nn.Module):
        owners += _registries(value)
    # What stands in them has a restorer of its own.
    kept = [(owner, contents(owner)) for owner in owners]
    return functools.partial(put_contents, kept)


def _put_array(array: Any, copy: Any) -> None:
    if array.flags.writeable:
        array[...] = copy


def _tensor_restorer(tensor: Tensor, copy: Tensor | None) -> Callable[[], None]:
    flag = tensor.requires_grad
    grad = tensor.grad if tensor.is_leaf else None

    def restore() -> None:
        if copy is not None and not _is_as(copy, tensor):
            # Through `.data`, so that graphs of the caller's which saved it stay valid.
            if tensor.shape == copy.shape and tensor.dtype == copy.dtype:
                tensor.data.copy_(copy)
            else:
                tensor.data = copy.clone()
        if tensor.is_leaf and tensor.grad is not grad:
            tensor.grad = grad
        if tensor.is_leaf and tensor.requires_grad != flag:
            tensor.requires_grad_(flag)

    return restore


def _is_stream(value: Any) -> bool:
    return any(generator is value for generator in generators_in([value]))


def _name(generator: Any) -> str:
    if isinstance(generator, torch.Generator):
        return f"of torch on {generator.device}"
    return getattr(generator, "__name__", type(generator).__name__)
