"""Keep what operations give in a forward, and take it in the recompute instead of computing it.

Note: [Places of calls]
Torch's own selective contexts give the results of an operation back in the order in which they were
kept. A recompute may call less, or more: code asks `is_recomputing()` before it multiplies for a
log, a cache of the whole process is full by then. Each later product would get the result of
another, often of the same shape: wrong gradients, and no error. So what is kept is known by the
place of its call, which is where each function on the way from the block stood. What was kept at
no such place, or changed in place since (`relu_` on a convolution), is computed again; but for what
a router chose, where it only scales the scores of that.
"""

from collections import defaultdict, deque
from collections.abc import Set
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from typing_extensions import override

from lightning_ckpt.core._torch import (
    ROUTING,
    TorchDispatchMode,
    alias,
    changes_arguments,
    has_known_values,
    tensor_version,
)
from lightning_ckpt.core.generators import get_state, is_same, set_state, torch_generators

Place = tuple[int, ...]

# Modules call one another through these lines: by one way or another, as there are hooks or not.
_OF_MODULES = nn.Module.__call__.__code__.co_filename


def place_of(frame: FrameType | None, outermost: Any) -> Place:
    """Note: [Places of calls].

    Args:
        frame: the function that calls.
        outermost: the code of the function where the way begins.
    """
    place: list[int] = []
    while frame is not None and frame.f_code is not outermost:
        if frame.f_code.co_filename != _OF_MODULES:
            place += (id(frame.f_code), frame.f_lasti)
        frame = frame.f_back
    return tuple(place)


class _Kept(NamedTuple):
    """What an operation gave: the result without its graph, how often its tensors had been changed
    in place, and the generator that it drew from with the state that it left."""

    result: Any
    versions: list[int]
    drawn: tuple[torch.Generator, Any] | None


class _Mode(TorchDispatchMode):
    supports_higher_order_operators = True

    def __init__(self, operations: Set[Any]) -> None:
        super().__init__()
        self.place: Place = ()  # of the call that is going on
        self.on = True
        self.kept: dict[tuple[Any, Place], deque[_Kept]] = defaultdict(deque)
        self._operations = operations

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.on or func not in self._operations or changes_arguments(func):
            return func(*args, **(kwargs or {}))
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        raise NotImplementedError


class Keeping(_Mode):
    """Around calls in the forward.

    Args:
        operations: whose results are kept.
    """

    @override
    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        generator = None if has_known_values(func) else _generator(args)
        before = get_state(generator) if generator else None
        result = func(*args, **kwargs)
        drawn = None
        if generator and not is_same(after := get_state(generator), before):
            drawn = generator, after
        alone = tuple(map(alias, result)) if isinstance(result, tuple) else alias(result)
        self.kept[func, self.place].append(_Kept(alone, _versions(alone), drawn))
        return result


class Taking(_Mode):
    """Around the same calls in the recompute: each result is taken once.

    Args:
        keeping: what stood around them in the forward.
    """

    def __init__(self, keeping: Keeping) -> None:
        super().__init__(keeping._operations)
        self.kept = keeping.kept

    @override
    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        waiting = self.kept.get((func, self.place))
        kept = waiting.popleft() if waiting else None
        now = _versions(kept.result) if kept else []
        if kept is None or now != kept.versions:
            # A router may have scaled the scores of what it chose, but not the choice.
            if kept and func in ROUTING and now[1] == kept.versions[1]:
                return _values_of(kept.result[1], *args, **kwargs), kept.result[1]
            return func(*args, **kwargs)
        if kept.drawn:  # what comes next draws as it did after this
            set_state(*kept.drawn)
        return kept.result


def _values_of(chosen: Tensor, given: Tensor, k: int, dim: int = -1, *_: Any, **__: Any) -> Tensor:
    """What `topk` of `given` would give beside its choice, if it chose the same again."""
    return given.gather(dim, chosen)


def _versions(result: Any) -> list[int]:
    tensors = result if isinstance(result, tuple) else (result,)
    return [tensor_version(tensor) for tensor in tensors if isinstance(tensor, Tensor)]


def _generator(args: Any) -> torch.Generator | None:
    """The one that an operation on these draws from."""
    device = next((arg.device for arg in args if isinstance(arg, Tensor)), None)
    return next((known for known in torch_generators() if known.device == device), None)
