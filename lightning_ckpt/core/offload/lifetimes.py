"""What has died since somebody last looked.

Note: [Interrupts]
Python drops an exception that is raised in a destructor or in the callback of a weak reference, and
so the KeyboardInterrupt of a Ctrl-C that comes while Python code runs there. Backward lets go of
tensors all the time. So nothing of an offload has a destructor, and what weak references call back
is written in C (`deque.append`, `SimpleQueue.put`): no signal is handled in it. What that tells of
is looked at later: where room is taken, where a block is called, where backward asks.
"""

import weakref
from collections import deque
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Lifetimes(Generic[T]):
    """A value for each of some objects, to be had once the object is dead."""

    def __init__(self) -> None:
        self._dead: deque[weakref.ref[Any]] = deque()  # filled by any thread, at any time
        self._known: dict[int, tuple[weakref.ref[Any], T]] = {}

    def watch(self, thing: object, value: T) -> None:
        reference = weakref.ref(thing, self._dead.append)
        self._known[id(reference)] = reference, value

    def ended(self) -> Iterator[T]:
        """The values of objects that died since the last time, each once."""
        while True:
            try:
                reference = self._dead.popleft()
            except IndexError:
                return
            yield self._known.pop(id(reference))[1]
