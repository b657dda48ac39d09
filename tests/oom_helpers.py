"""Memory that runs out where a test says so."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from lightning_ckpt.core._torch import TorchDispatchMode
from lightning_ckpt.core.memory.peak import PeakTracker

MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."


class Bomb(TorchDispatchMode):
    """While armed, the n-th operation fails before it does anything; for each n of `at`, in turn.
    The count goes on over the tries of one batch."""

    def __init__(self, at: Iterable[int] = (), error: type[Exception] | None = None) -> None:
        super().__init__()
        self.at = list(at)
        self.error = error or torch.OutOfMemoryError
        self.is_armed = False
        self.count = self.hits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_armed:
            self.count += 1
            if self.at and self.count >= self.at[0]:
                self.at.pop(0)
                self.hits += 1
                self.is_armed = False  # until a new try arms it
                raise self.error(MESSAGE)
        return func(*args, **(kwargs or {}))


class Limit(TorchDispatchMode):
    """While armed, no operation begins when more bytes are live than the limit."""

    def __init__(self, tracker: PeakTracker, limit: int) -> None:
        super().__init__()
        self.tracker, self.limit = tracker, limit
        self.is_armed = False
        self.hits = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_armed and self.tracker.current_bytes > self.limit:
            self.hits += 1
            self.is_armed = False
            raise torch.OutOfMemoryError(MESSAGE)
        return func(*args, **(kwargs or {}))


def bits(value: Any) -> Any:
    """The same with floats as the integers that their bits are: -0.0 is not 0.0."""
    if isinstance(value, Tensor):
        value = torch.view_as_real(value) if value.is_complex() else value
        ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        return value.detach().contiguous().view(ints[value.element_size()]).clone()
    if isinstance(value, dict):
        return {key: bits(item) for key, item in value.items()}
    return [bits(item) for item in value] if isinstance(value, (list, tuple)) else value
