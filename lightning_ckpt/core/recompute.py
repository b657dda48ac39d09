"""One block's checkpointed forward: keep its inputs, drop the rest, compute it again in backward.

Built on `torch.utils.checkpoint.checkpoint(..., use_reentrant=False)`, which replays torch's own
generators and autocast; the reentrant form loses gradients of frozen-input and keyword arguments
and is never used. Around it stand the arguments (so that torch sees every tensor) and the state
that torch does not know of.
"""

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.checkpoint import checkpoint

from lightning_ckpt.core import _transformers
from lightning_ckpt.core._torch import checkpoint_around
from lightning_ckpt.core.arguments import Flat, flatten
from lightning_ckpt.core.compiled import (
    changeable_buffers,
    warn_of_buffers,
    warn_of_memory_budget,
    warn_of_offload,
)
from lightning_ckpt.core.replay import Replay, check_unchanged, replayed
from lightning_ckpt.core.saving import Narrow, Saving, contexts, narrow_contexts
from lightning_ckpt.core.state import Before
from lightning_ckpt.core.surroundings import Surroundings
from lightning_ckpt.core.watchers import Phase, Watch, Watched, saving_inputs, watches

Forward = Callable[..., Any]

_depth = threading.local()  # backward runs in threads of its own


def is_recomputing() -> bool:
    """Whether the code that asks runs inside the recompute of a checkpointed block.

    For a forward with side effects that must happen once per step, such as `self.log`, a metric's
    `update` or an append to a list outside the block:

        if not is_recomputing():
            self.log("router/load", load)

    Always False in code that `torch.compile` compiled: there is no second call of it.
    """
    if torch.compiler.is_compiling():
        return False
    return getattr(_depth, "value", 0) > 0


class Options(NamedTuple):
    """What is known of a block before it is called.

    Attributes:
        saved_inputs: makes the context, for a block and the tensors among its arguments, in which
            these are saved for backward.
        takes_caches: whether Transformers may give it key-value caches.
        saving: which of its results are kept for the recompute; None: none.
        moves_inputs: whether that context moves them elsewhere.
    """

    saved_inputs: Callable[[nn.Module, Sequence[Tensor]], AbstractContextManager[Any]]
    takes_caches: bool
    saving: Saving | None = None
    moves_inputs: bool = False


def checkpointed_forward(
    module: nn.Module,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Any:
    """Run `forward(module, *args, **kwargs)` and keep only what it was called with.

    It runs plainly, at no cost, where backward will never need the block: while autograd records
    nothing, or when neither the arguments nor the block's parameters need gradients.

    Args:
        module: the block, whose state is replayed in the recompute.
        forward: the block's own forward, unbound (dynamo cannot follow the making of methods).
        args: its positional arguments.
        kwargs: its keyword arguments.
        options: what is known of the block beforehand.

    Returns:
        What `forward` returns.
    """
    # Not while TorchScript traces for a picture of the graph: our copies would be in it.
    if not torch.is_grad_enabled() or torch.jit.is_tracing():
        return forward(module, *args, **kwargs)
    return _eager(module, forward, args, kwargs, options)


@torch.compiler.substitute_in_graph(checkpointed_forward)
def _traced(
    module: nn.Module,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Any:
    """What `torch.compile` puts into the graph: a plain call, without any Python side effect.

    Compiled code has its own way of replaying random numbers and of updating buffers once. A block
    that changes state in a way which cannot be put into a checkpointed graph makes dynamo break the
    graph at `checkpointed_forward`, and that runs in eager (with `fullgraph=True` dynamo raises). A
    branch on `is_compiling` would not do: broken graphs go on in eager as if it still were True.
    """
    if not torch.is_grad_enabled():
        return forward(module, *args, **kwargs)
    if options.moves_inputs:  # hooks on saved tensors do not reach into compiled code
        warn_of_offload(type(module).__qualname__)
        return _eager(module, forward, args, kwargs, options)
    warn_of_memory_budget()
    if names := changeable_buffers(module):
        warn_of_buffers(type(module).__qualname__, names)
    if options.takes_caches:
        args, kwargs = _transformers.without_caches(module, args, kwargs)

    def region(*args: Any) -> Any:  # keywords inside: `checkpoint` would take some for its own
        return forward(module, *args, **kwargs)

    if options.saving is None:
        return checkpoint(region, *args, use_reentrant=False)
    kept = partial(contexts, options.saving)
    return checkpoint(region, *args, use_reentrant=False, context_fn=kept)


# Disabled, or a graph broken above would compile pieces of the block in forward and not in the
# recompute, which then saves other tensors. What the user compiled inside the block stays compiled.
@torch.compiler.disable
def _eager(
    module: nn.Module,
    forward: Forward,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: Options,
) -> Any:
    if _transformers.already_checkpointing(module):
        return forward(module, *args, **kwargs)
    if options.takes_caches:
        args, kwargs = _transformers.without_caches(module, args, kwargs)
    flat = flatten((args, kwargs))
    given = [other for other in flat.others if isinstance(other, nn.Module)]
    if not _needs_grad(flat.tensors, (module, *given)) or _is_lazy(module):
        return forward(module, *args, **kwargs)
    if around := checkpoint_around():
        _warn_of_checkpoint_around(type(module).__qualname__)
        if around == "reentrant":  # backward through this very forward follows at once
            return forward(module, *args, **kwargs)
    _refuse_iterators(module, flat.others)
    before = Before(module, flat.others)
    region = _Region(module, forward, args, kwargs, flat, before, options.saving)
    with region.saved_inputs(), options.saved_inputs(module, flat.tensors):  # the inner one rules
        result = checkpoint(region, *flat.tensors, use_reentrant=False)
    for tensor in (result,) if isinstance(result, Tensor) else flatten(result).tensors:
        if tensor.grad_fn is not None:
            tensor.register_hook(region.check)
    return result


def _warn_of_checkpoint_around(class_name: str) -> None:
    warnings.warn(
        f"{class_name} is called inside of a torch.utils.checkpoint by the model's own code (or, "
        "as the reentrant form does, in a backward pass): where several blocks share such a call, "
        "some are computed three times; take it out, or leave these blocks out by `layers=`",
        stacklevel=2,
    )


def _is_lazy(module: nn.Module) -> bool:
    """Lazy modules get parameters, and another class, in their first call: no replay of that."""
    return any(
        tensor is not None and is_lazy(tensor)
        for child in module.modules()
        for tensor in (*child._parameters.values(), *child._buffers.values())
    )


def _refuse_iterators(module: nn.Module, others: Sequence[Any]) -> None:
    for other in others:
        if isinstance(other, Iterator):
            raise TypeError(
                f"an argument of a checkpointed {type(module).__name__} is an iterator, "
                f"{other!r}, and would be exhausted when the block is computed again; pass a list"
            )


def _needs_grad(tensors: Sequence[Tensor], modules: Sequence[nn.Module]) -> bool:
    return any(tensor.requires_grad for tensor in tensors) or any(
        parameter.requires_grad for module in modules for parameter in module.parameters()
    )


class _Region:
    """One call of a block, alive as long as its graph: torch calls it once in forward, and again
    for each backward. The first call gets the caller's own arguments, so that a list or dict that
    the block fills is the caller's; later ones get new containers around the saved tensors.
    """

    def __init__(
        self,
        module: nn.Module,
        forward: Forward,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        flat: Flat,
        before: Before,
        saving: Saving | None,
    ) -> None:
        self._module = module
        self._forward = forward
        self._modules = before.modules
        self._build = flat.build
        self._surroundings = Surroundings()
        # Let go by the first call, or the tensors would stay alive here, offloaded or not.
        self._given: tuple[tuple[Any, ...], dict[str, Any]] | None = (args, kwargs)
        self._before: Before | None = before  # until the forward has ended
        self._replay: Replay | None = None
        self._saved: tuple[Narrow, Narrow] | None = narrow_contexts(saving) if saving else None
        self._watches: list[Watch] = watches(module)
        self._is_checked = False

    def __call__(self, *tensors: Tensor) -> Any:
        if self._given is not None:
            return self._first()
        # A block may run backward inside its forward (the gradient of an energy): not settled yet.
        replay = self._replay or self._before.settle()  # type: ignore[union-attr]
        if not self._is_checked:
            check_unchanged(replay, self._module)
        self._is_checked = False
        args, kwargs = self._build(tensors)
        # In a variable of its own: it dies with this frame, so it sees when all others have died.
        watch = self._watched("recompute")
        with _recomputing(), replayed(replay, self._modules), self._taking() as run, watch:
            self._surroundings.run(run, self._forward, self._module, *args, **kwargs)

    def check(self, grad: Tensor) -> None:
        """Called when backward reaches the block's result: later, an optimizer that steps in
        backward may change a parameter as soon as nothing in the block needs its old value."""
        if not self._is_checked and self._replay is not None:
            check_unchanged(self._replay, self._module)
        self._is_checked = True

    def _first(self) -> Any:
        assert self._given is not None
        assert self._before is not None
        args, kwargs = self._given
        self._given = None
        run = self._saved[0].run if self._saved else _plainly
        with self._watched("forward"):
            result = run(self._forward, self._module, *args, **kwargs)
        self._replay, self._before = self._before.settle(), None
        return result

    @contextmanager
    def _taking(self) -> Iterator[Forward]:
        """Take kept results in place of computing them, by the function that this gives: once. Let
        them go with it, so that a second backward computes them all. In the middle of a forward
        none is taken, or kept."""
        if self._saved is None:
            yield _plainly
            return
        keeping, taking = self._saved
        if self._replay is None:
            with keeping.paused():
                yield _plainly
            return
        self._saved = None
        yield taking.run

    def saved_inputs(self) -> AbstractContextManager[Any]:
        """The context in which torch saves them."""
        return saving_inputs(self._watches) if self._watches else nullcontext()

    def _watched(self, phase: Phase) -> AbstractContextManager[Any]:
        return Watched(self._watches, phase) if self._watches else nullcontext()


def _plainly(forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


@contextmanager
def _recomputing() -> Iterator[None]:
    _depth.value = getattr(_depth, "value", 0) + 1
    try:
        yield
    finally:
        _depth.value -= 1
