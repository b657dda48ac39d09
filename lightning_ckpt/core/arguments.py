"""A call's arguments as a flat list of tensors, and back.

`torch.utils.checkpoint` shows only positional tensors to saved-tensor hooks, to the in-place check
and to the choice of device generators; tensors in keywords and containers would go unseen.

Unlike `torch.utils._pytree`, dataclasses are opened too, nothing needs to be registered, and a
container that stands in two places stays one container.
"""

import copy
import dataclasses
import sys
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ckpt.core._torch import tensor_version

PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.Size, torch.dtype})
_MAPPINGS = (dict, UserDict)


class Flat(NamedTuple):
    """What a value is made of.

    Attributes:
        tensors: each tensor in it, once.
        others: the objects in it that are neither tensors, nor containers, nor plain values.
        build: puts tensors in the places of `tensors`, in new containers at every call. Those have
            the types and contents that the containers had when they were flattened, so a callee
            which changes them changes only its own.
    """

    tensors: list[Tensor]
    others: list[Any]
    build: Callable[[Sequence[Tensor]], Any]


def flatten(value: Any) -> Flat:
    """Take the tensors out of nested containers: list, tuple, deque, dict, set, NumPy array, their
    subclasses and dataclasses. Other objects are passed on as they are."""
    walk = _Walk()
    place = walk.visit(value)
    return Flat(walk.tensors, walk.others, lambda tensors: place(_Rebuild(tensors)))


def tensors_of(value: Any) -> list[Tensor]:
    """The tensors among an operation's arguments or results, which are lists and dicts at most."""
    if isinstance(value, Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value
    is_container = isinstance(value, (list, tuple, dict))
    return [tensor for item in items for tensor in tensors_of(item)] if is_container else []


def is_open(value: Any) -> bool:
    """Whether `flatten` would look into `value`."""
    if type(value) in PLAIN:
        return False
    if isinstance(value, tuple):  # one of plain values only (a shape, say) is passed on as it is
        return not all(type(item) in PLAIN for item in value)
    if isinstance(value, (list, deque, set, *_MAPPINGS)):
        return True
    return (dataclasses.is_dataclass(value) and not isinstance(value, type)) or _is_array(value)


def is_opaque(value: Any) -> bool:
    """An object with contents that we cannot copy for the recompute."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, nn.Module)


def identities(value: Any) -> list[tuple[int, int]]:
    return [(id(tensor), tensor_version(tensor)) for tensor in tensors_inside(value)]


def tensors_inside(value: Any, depth: int = 3) -> list[Tensor]:
    """The tensors in an object's attributes, some levels deep."""
    if isinstance(value, Tensor):
        return [value]
    inner: Iterable[Any] = ()
    if depth and isinstance(value, dict):
        inner = value.values()
    elif depth and isinstance(value, (list, tuple)):
        inner = value
    elif depth and is_opaque(value):
        inner = vars(value).values()
    return [found for item in list(inner) for found in tensors_inside(item, depth - 1)]


class _Rebuild:
    """One rebuilding: the tensors to use, and the containers made so far."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.made: dict[int, Any] = {}


_Place = Callable[[_Rebuild], Any]


class _Walk:
    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.others: list[Any] = []
        self._tensor_index: dict[int, int] = {}
        self._places: dict[int, _Place] = {}

    def visit(self, value: Any) -> _Place:
        # Tensors of inference mode cannot be saved for backward; nothing can change them either.
        if isinstance(value, Tensor) and not value.is_inference():
            return self._tensor(value)
        if not is_open(value):
            if type(value) not in PLAIN and not isinstance(value, Tensor):
                self.others.append(value)
            return lambda rebuild: value
        key = id(value)
        if key not in self._places:
            # Set first: a container that holds itself ends here and not in endless recursion.
            self._places[key] = lambda rebuild: rebuild.made.get(key, value)
            self._places[key] = _once(key, self._container(value))
        return self._places[key]

    def _tensor(self, tensor: Tensor) -> _Place:
        index = self._tensor_index.setdefault(id(tensor), len(self.tensors))
        if index == len(self.tensors):
            self.tensors.append(tensor)
        return lambda rebuild: rebuild.tensors[index]

    def _container(self, value: Any) -> _Place:
        if _is_array(value) or isinstance(value, set) or _is_plain_list(value):
            kept = value.copy()
            return lambda rebuild: kept.copy()
        if isinstance(value, tuple):
            return _tuple_place(value, [self.visit(item) for item in value])
        if isinstance(value, (list, deque)):
            return _list_place(value, [self.visit(item) for item in value])
        entries = dict(value.items()) if isinstance(value, _MAPPINGS) else {}
        fields = _fields(value)
        item_places = {key: self.visit(item) for key, item in entries.items()}
        field_places = {name: self.visit(item) for name, item in fields.items()}
        empty = copy.copy(value)  # keeps type, order, default factory and other attributes
        _empty(empty, entries, fields)
        return lambda rebuild: _filled(copy.copy(empty), item_places, field_places, rebuild)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def _is_plain_list(value: Any) -> bool:
    return type(value) is list and all(type(item) in PLAIN for item in value)


def _fields(value: Any) -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        return {}
    names = (field.name for field in dataclasses.fields(value))
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _once(key: int, place: _Place) -> _Place:
    def build(rebuild: _Rebuild) -> Any:
        if key not in rebuild.made:
            rebuild.made[key] = place(rebuild)
        return rebuild.made[key]

    return build


def _tuple_place(value: tuple[Any, ...], items: list[_Place]) -> _Place:
    kind, attributes = type(value), dict(getattr(value, "__dict__", {}))
    if kind.__module__ == "torch.return_types":  # made in C, from one sequence
        return lambda rebuild: kind([item(rebuild) for item in items])

    def build(rebuild: _Rebuild) -> Any:
        # Not by its own __new__, which may want other arguments (named tuples do).
        made = tuple.__new__(kind, [item(rebuild) for item in items])
        if attributes:
            vars(made).update(attributes)
        return made

    return build


def _list_place(value: Any, items: list[_Place]) -> _Place:
    empty = copy.copy(value)
    empty.clear()

    def build(rebuild: _Rebuild) -> Any:
        made = copy.copy(empty)
        made.extend(item(rebuild) for item in items)
        return made

    return build


def _empty(value: Any, entries: dict[Any, Any], fields: dict[str, Any]) -> None:
    """Take the contents out of our own shallow copy, so that it keeps no tensor alive.

    The methods of the base are used as they are: subclasses such as Transformers' `ModelOutput`
    forbid some of them and mirror others into attributes.
    """
    if isinstance(value, OrderedDict):
        OrderedDict.clear(value)
    elif isinstance(value, dict):
        dict.clear(value)
    elif entries:
        value.clear()
    for name in fields:
        object.__setattr__(value, name, None)


def _filled(
    value: Any, items: dict[Any, _Place], fields: dict[str, _Place], rebuild: _Rebuild
) -> Any:
    for name, place in fields.items():
        object.__setattr__(value, name, place(rebuild))
    for key, place in items.items():
        if isinstance(value, OrderedDict):
            OrderedDict.__setitem__(value, key, place(rebuild))
        elif isinstance(value, dict):
            dict.__setitem__(value, key, place(rebuild))
        else:
            value[key] = place(rebuild)
    return value
