"""A call's arguments as a flat list of tensors, and back.

`torch.utils.checkpoint` shows only positional tensors to saved-tensor hooks, to the in-place check
and to the choice of device generators; tensors in keywords and containers would go unseen.

Unlike `torch.utils._pytree`, dataclasses are opened too, nothing needs to be registered, and a
container that stands in two places stays one container.
"""

import copy
import dataclasses
from collections import OrderedDict, UserDict, defaultdict, deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

Build = Callable[[Sequence[Tensor]], Any]
_SEQUENCES = (list, tuple, deque)
_MAPPINGS = (dict, OrderedDict, defaultdict, UserDict)


def flatten(value: Any) -> tuple[list[Tensor], Build]:
    """Take the tensors out of nested containers.

    Args:
        value: any nest of list, tuple, named tuple, deque, dict (and their subclasses) and
            dataclass; other objects are passed on as they are.

    Returns:
        The tensors, each once, and a function that puts tensors in their places: it makes new
        containers of the same types at every call, with the contents of this moment, so that a
        callee which changes them changes only its own.
    """
    flat = _Flat()
    place = flat.visit(value)
    return flat.tensors, lambda tensors: place(_Rebuild(tensors))


class _Rebuild:
    """One rebuilding: the tensors to use, and the containers made so far."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.made: dict[int, Any] = {}


_Place = Callable[[_Rebuild], Any]


class _Flat:
    """The tensors of one value, and where each belongs."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self._tensor_index: dict[int, int] = {}
        self._places: dict[int, _Place] = {}

    def visit(self, value: Any) -> _Place:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if not _is_container(value):
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
        if isinstance(value, _SEQUENCES):
            items = [self.visit(item) for item in value]
            return _sequence_place(value, items)
        entries = {} if not isinstance(value, _MAPPINGS) else dict(value.items())
        fields = _fields(value)
        item_places = {key: self.visit(item) for key, item in entries.items()}
        field_places = {name: self.visit(item) for name, item in fields.items()}
        empty = copy.copy(value)  # keeps type, order, default factory and other attributes
        _empty(empty, entries, fields)
        return lambda rebuild: _filled(copy.copy(empty), item_places, field_places, rebuild)


def _is_container(value: Any) -> bool:
    if isinstance(value, tuple):  # one of plain values only (a shape, say) is passed on as it is
        return any(isinstance(item, Tensor) or _is_container(item) for item in value)
    if isinstance(value, (list, deque, *_MAPPINGS)):
        return True
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


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


def _sequence_place(value: Any, items: list[_Place]) -> _Place:
    kind = type(value)
    if isinstance(value, tuple):
        if hasattr(value, "_fields"):
            return lambda rebuild: kind(*(item(rebuild) for item in items))
        return lambda rebuild: kind(item(rebuild) for item in items)
    empty = copy.copy(value)
    empty.clear()

    def build(rebuild: _Rebuild) -> Any:
        made = copy.copy(empty)
        made.extend(item(rebuild) for item in items)
        return made

    return build


def _empty(value: Any, entries: dict[Any, Any], fields: dict[str, Any]) -> None:
    """Take the contents out of our own shallow copy, so that it keeps no tensor alive.

    The methods of `dict` are used as they are: subclasses such as Transformers' `ModelOutput`
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
