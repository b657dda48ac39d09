"""Move saved inputs to the host and back, by plain copies."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_ckpt.core._torch import tensor_version, view_base
from lightning_ckpt.core.offload.config import OffloadConfig


class _Stayed(NamedTuple):
    """A tensor that was not moved, and its version then: under saved-tensor hooks autograd no
    longer looks for in-place changes."""

    tensor: Tensor
    version: int


class _Moved(NamedTuple):
    """A tensor's copy on the host, and what it takes to put it back."""

    copy: Tensor
    device: torch.device
    size: torch.Size


def nothing_to_move() -> bool:
    """Whether every tensor is on the host already, because there is no other device."""
    return not torch.accelerator.is_available()


def saved_inputs(offload: OffloadConfig | None) -> Callable[[], AbstractContextManager[Any]]:
    """What makes the context in which a block's inputs are saved for backward."""
    if offload is None or nothing_to_move():
        return nullcontext
    return _to_host


def _to_host() -> AbstractContextManager[Any]:
    return saved_tensors_hooks(_pack, _unpack)


def _pack(tensor: Tensor) -> _Stayed | _Moved:
    if _stays(tensor):
        return _Stayed(tensor, tensor_version(tensor))
    # An expanded tensor is moved at its own size, and expanded again.
    own = tensor
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0:
            own = own.narrow(dim, 0, 1)
    host = torch.empty_like(own, device="cpu", pin_memory=torch.accelerator.is_available())
    return _Moved(host.copy_(own), tensor.device, tensor.size())


def _is_on_host(tensor: Tensor) -> bool:
    return tensor.device.type == "cpu"


def _stays(tensor: Tensor) -> bool:
    return (
        _is_on_host(tensor)
        or tensor.layout != torch.strided
        or isinstance(view_base(tensor), nn.Parameter)
    )


def _unpack(packed: _Stayed | _Moved) -> Tensor:
    if isinstance(packed, _Moved):
        return packed.copy.to(packed.device, non_blocking=True).expand(packed.size)
    if tensor_version(packed.tensor) != packed.version:
        raise RuntimeError(
            "an input of a checkpointed block was modified by an inplace operation after it was "
            f"saved for backward (a tensor of shape {tuple(packed.tensor.shape)} at version "
            f"{tensor_version(packed.tensor)}, expected {packed.version}); clone it before"
        )
    return packed.tensor
