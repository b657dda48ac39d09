"""Who wants to know when a block is computed again."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

Watcher = Callable[[nn.Module, bool], None]

_watchers: list[Watcher] = []


@contextmanager
def watch_recomputes(watcher: Watcher) -> Iterator[None]:
    """Call `watcher(block, True)` when the recompute of a block begins, and `watcher(block, False)`
    when it ends, also where torch ends it by an exception. The watcher must not raise."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)


@contextmanager
def counted_recomputes() -> Iterator[Counter[nn.Module]]:
    """Count how often each block is computed again, in every thread (compiled code is not seen)."""
    counts: Counter[nn.Module] = Counter()

    def count(block: nn.Module, begins: bool) -> None:
        counts[block] += begins

    with watch_recomputes(count):
        yield counts


@contextmanager
def watched(block: nn.Module) -> Iterator[None]:
    """Tell the watchers of the recompute of `block` that runs in here."""
    watchers = list(_watchers)
    for watcher in watchers:
        watcher(block, True)
    try:
        yield
    finally:
        for watcher in watchers:
            watcher(block, False)
