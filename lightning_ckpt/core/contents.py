"""What is in a container, and putting it back in place: others may hold the same container."""

import operator
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import Any

CONTAINERS = (dict, list, set, deque)


def contents(owner: Any) -> Any:
    """What is in a container now, by reference."""
    return dict(owner.items()) if isinstance(owner, dict) else list(owner)


def put_contents(kept: Iterable[tuple[Any, Any]]) -> None:
    """Put back what `contents` gave, into each container that has something else in it by now."""
    for owner, content in kept:
        if not _is_untouched(owner, content):
            _put(owner, content)


def _put(owner: Any, content: Any) -> None:
    """By the methods of the base: subclasses such as Transformers' `ModelOutput` forbid some."""
    base: Any = next(kind for kind in (OrderedDict, *CONTAINERS) if isinstance(owner, kind))
    base.clear(owner)
    if isinstance(owner, dict):
        for key, value in content.items():
            base.__setitem__(owner, key, value)
    elif isinstance(owner, set):
        owner.update(content)
    else:
        owner.extend(content)


def _is_untouched(owner: Any, content: Any) -> bool:
    """Whether it holds the same objects in the same order."""
    if isinstance(owner, set):
        return bool(owner == set(content))
    now = _flat(owner)
    before = _flat(content)
    return len(now) == len(before) and all(map(operator.is_, now, before))


def _flat(owner: Any) -> list[Any]:
    return [*owner.keys(), *owner.values()] if isinstance(owner, dict) else list(owner)
