"""Who wants to know when a checkpointed block is computed, and computed again."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any, Literal, Protocol, runtime_checkable

from torch import nn

Phase = Literal["forward", "recompute"]
Watch = Callable[[Phase], AbstractContextManager[Any]]
Watcher = Callable[[nn.Module], Watch | None]

_watchers: list[Watcher] = []  # not of one thread: backward runs in threads of its own


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """While this lasts, ask `watcher(block)` at each call of a checkpointed block for a watch. It
    makes a context for each computation of the call: `watch("forward")`, `watch("recompute")`,
    which torch may end by an exception. Neither may raise.
    """
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def counted_recomputes() -> Iterator[Counter[nn.Module]]:
    """Count how often each block that is called in here is computed again, in every thread
    (compiled code is not seen)."""
    counts: Counter[nn.Module] = Counter()

    @contextmanager
    def count(block: nn.Module, phase: Phase) -> Iterator[None]:
        counts[block] += phase == "recompute"
        yield

    with watching(lambda block: partial(count, block)):
        yield counts


def watches(block: nn.Module) -> list[Watch]:
    """What watches the call of `block` that begins."""
    return [watch for watcher in _watchers if (watch := watcher(block)) is not None]


@runtime_checkable
class SeesInputs(Protocol):
    """A watch that also follows what the call saves of its arguments."""

    def inputs(self) -> AbstractContextManager[Any]:
        """The context in which they are saved for backward."""


@contextmanager
def saving_inputs(watches: list[Watch]) -> Iterator[None]:
    """The context in which a call saves its arguments; of several watches the last sees them."""
    with ExitStack() as entered:
        for watch in watches:
            if isinstance(watch, SeesInputs):
                entered.enter_context(watch.inputs())
        yield


class Watched:
    """A context in which `watches` see one computation. It keeps theirs as long as it lives itself,
    for one that wants to know when all in the computation has died, too."""

    def __init__(self, watches: list[Watch], phase: Phase) -> None:
        self._contexts = [watch(phase) for watch in watches]
        self._entered = ExitStack()

    def __enter__(self) -> None:
        for context in self._contexts:
            self._entered.enter_context(context)

    def __exit__(self, *error: Any) -> None:
        self._entered.__exit__(*error)
