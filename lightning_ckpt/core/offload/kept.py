"""A block that keeps its activations, elsewhere."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from lightning_ckpt.core.arguments import flatten
from lightning_ckpt.core.compiled import warn_of_offload
from lightning_ckpt.core.offload.engine import saving


def kept_forward(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run `forward(module, *args, **kwargs)`; what it saves for backward waits as the plan says."""
    if not torch.is_grad_enabled() or torch.jit.is_tracing():
        return forward(module, *args, **kwargs)
    return _eager(module, forward, args, kwargs)


@torch.compiler.substitute_in_graph(kept_forward)
def _traced(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    if not torch.is_grad_enabled():
        return forward(module, *args, **kwargs)
    warn_of_offload(type(module).__qualname__)
    return _eager(module, forward, args, kwargs)


def followed_forward(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run it; the offload of other blocks hears when backward comes to it."""
    if not torch.is_grad_enabled() or torch.jit.is_tracing():
        return forward(module, *args, **kwargs)
    return _eager(module, forward, args, kwargs)


@torch.compiler.substitute_in_graph(followed_forward)
def _traced_plainly(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return forward(module, *args, **kwargs)


@torch.compiler.disable  # hooks on saved tensors do not reach into compiled code
def _eager(
    module: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    with saving(module, flatten((args, kwargs)).tensors, is_recomputed=False):
        return forward(module, *args, **kwargs)
