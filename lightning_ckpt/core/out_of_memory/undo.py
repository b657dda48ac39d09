"""What a failed try of a training step changed, undone: the same batch can then be tried again.

Taken before every batch, so it has to be cheap, and is for one use. Attributes and containers are
kept by reference, generators and small tensors as copies; parameters and large tensors are not
copied, and where one of those has moved (autograd's version counter tells) there is no way back.
As in a recompute (`core.state`), the inside of objects that are attributes is not looked at; that
of a batch is.
"""

from collections import UserDict
from collections.abc import Iterable, Iterator
from io import IOBase
from types import ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_ckpt.core._torch import is_fake, tensor_version
from lightning_ckpt.core.arguments import PLAIN, is_opaque
from lightning_ckpt.core.contents import CONTAINERS, contents, put_contents
from lightning_ckpt.core.generators import (
    generators_in,
    get_state,
    is_generator,
    set_state,
    torch_generators,
)
from lightning_ckpt.core.sameness import is_array

_SMALL_BYTES = 64 * 1024
_MANY = 64  # tensors in one container (the states of a metric that keeps everything): not copied
_DEPTH = 4  # levels of objects in a batch
_INTERNALS = frozenset(vars(nn.Module())) - {"training"}
_REGISTRIES = ("_parameters", "_buffers", "_modules")


class _Seen(NamedTuple):
    """A tensor as it was; `copy` is None where there is none."""

    tensor: Tensor
    version: int
    requires_grad: bool
    grad: Tensor | None
    grad_version: int
    copy: Tensor | None


class StateBefore:
    """State of a model before a try, and of what the try gets.

    Args:
        model: its modules, their buffers, attributes, and containers in these.
        given: objects that are looked into: a batch, what collects results.
        strangers: objects that are not (the trainer).
        others: objects that take part in the try, whose attributes change like the model's.
    """

    def __init__(
        self,
        model: nn.Module,
        given: Iterable[Any] = (),
        strangers: Iterable[Any] = (),
        others: Iterable[Any] = (),
    ) -> None:
        self._model = model
        self._contents: list[tuple[Any, Any]] = []
        self._arrays: list[tuple[Any, Any]] = []
        self._tensors: list[_Seen] = []
        self._lazy: list[Tensor] = []
        self._iterator: Any = None  # one of those met: it cannot be turned back, nor asked
        self._known: dict[int, Any] = {id(stranger): stranger for stranger in strangers}
        streams = [*generators_in(()), *torch_generators()]
        self._streams = [(stream, get_state(stream)) for stream in streams]
        self._look([model, *map(vars, others)], 0)
        self._look(given, _DEPTH)

    def obstacle(self) -> str | None:
        """What has moved and cannot be put back, in words; None if all can."""
        if self._iterator is not None:
            kind = type(self._iterator).__name__
            return f"a {kind} in the batch or in an attribute may have moved on"
        for tensor in self._lazy:
            if not is_lazy(tensor):
                return f"{self._name(tensor)} was made"
        for seen in self._tensors:
            if seen.copy is None and tensor_version(seen.tensor) != seen.version:
                return f"{self._name(seen.tensor)} was changed in place"
            if seen.grad is not None and tensor_version(seen.grad) != seen.grad_version:
                return f"the gradient of {self._name(seen.tensor)} was changed in place"
        return None

    def restore(self) -> None:
        """Put everything back, in place: others may hold the same objects."""
        put_contents(reversed(self._contents))
        for array, copy in self._arrays:
            if array.flags.writeable:
                array[...] = copy
        for seen in self._tensors:
            _put_tensor(seen)
        for stream, state in self._streams:
            set_state(stream, state)

    def _look(self, roots: Iterable[Any], depth: int) -> None:
        """Note all that can be reached; `_known` keeps it alive, for the ids."""
        waiting = [(root, depth) for root in roots]
        known = self._known
        while waiting:
            value, depth = waiting.pop()
            if type(value) in PLAIN or id(value) in known:
                continue
            known[id(value)] = value
            if isinstance(value, Tensor):
                self._tensor(value, copies=True)
            elif isinstance(value, nn.Module):
                waiting += [(item, depth) for item in self._module(value)]
            elif isinstance(value, (*CONTAINERS, tuple)):
                waiting += [(item, depth) for item in self._container(value)]
            else:
                waiting += [(item, depth - 1) for item in self._object(value, depth)]

    def _module(self, module: nn.Module) -> Iterator[Any]:
        attributes = vars(module)
        self._contents.append((attributes, dict(attributes)))
        for name in attributes.keys() - _INTERNALS:
            yield attributes[name]
        for registry in _REGISTRIES:
            if entries := attributes.get(registry):
                self._contents.append((entries, dict(entries)))
                yield from entries.values()

    def _container(self, container: Any) -> Iterable[Any]:
        if not isinstance(container, tuple):
            self._contents.append((container, contents(container)))
        items = list(container.values() if isinstance(container, dict) else container)
        if hasattr(container, "__dict__"):
            items += self._attributes(container)
        if set(map(type, items)) <= PLAIN:
            return ()
        tensors = [item for item in items if isinstance(item, Tensor)]
        for tensor in tensors if len(tensors) > _MANY else ():
            self._known[id(tensor)] = tensor
            self._tensor(tensor, copies=False)
        return items

    def _object(self, value: Any, depth: int) -> Iterable[Any]:
        if is_array(value):
            if value.nbytes <= _SMALL_BYTES:
                self._arrays.append((value, value.copy()))
        elif is_generator(type(value)):  # type: ignore[arg-type]
            self._streams.append((value, get_state(value)))
        elif isinstance(value, Iterator) and not isinstance(value, IOBase):
            self._iterator = value
        elif isinstance(value, UserDict) or (depth > 0 and _is_opened(value)):
            return self._attributes(value)
        return ()

    def _attributes(self, value: Any) -> Iterable[Any]:
        self._contents.append((vars(value), dict(vars(value))))
        return list(vars(value).values())

    def _tensor(self, tensor: Tensor, copies: bool) -> None:
        if is_lazy(tensor):
            self._lazy.append(tensor)
            return
        version, flag = tensor_version(tensor), tensor.requires_grad
        if isinstance(tensor, nn.Parameter):  # its gradient is for `core.out_of_memory.sums`
            self._tensors.append(_Seen(tensor, version, flag, None, 0, None))
        elif not is_fake(tensor):
            is_small = tensor.numel() * tensor.element_size() <= _SMALL_BYTES
            copy = tensor.detach().clone() if is_small and copies else None
            grad = tensor.grad if tensor.is_leaf else None
            grad_version = 0 if grad is None else tensor_version(grad)
            self._tensors.append(_Seen(tensor, version, flag, grad, grad_version, copy))

    def _name(self, tensor: Tensor) -> str:
        named = {id(p): f"parameter {name!r}" for name, p in self._model.named_parameters()}
        named |= {id(b): f"buffer {name!r}" for name, b in self._model.named_buffers()}
        return named.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)}")


def _is_opened(value: Any) -> bool:
    return is_opaque(value) and not isinstance(value, ModuleType)


def _put_tensor(seen: _Seen) -> None:
    tensor, copy = seen.tensor, seen.copy
    if copy is not None and not tensor.is_inference():
        # Without comparing: 0.0 and -0.0 are equal, and not the same. Through `.data`, so that
        # graphs which saved it (truncated backward) stay valid.
        if tensor.shape == copy.shape and tensor.dtype == copy.dtype:
            tensor.data.copy_(copy)
        else:
            tensor.data = copy
    if tensor.is_leaf:
        if tensor.requires_grad != seen.requires_grad:
            tensor.requires_grad_(seen.requires_grad)
        if not isinstance(tensor, nn.Parameter) and tensor.grad is not seen.grad:
            tensor.grad = seen.grad
