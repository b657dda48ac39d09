"""Which tensors a module, an optimizer, a batch hold, and what they are there."""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_ckpt.core._torch import coo_parts


def tensors_in(holder: Any) -> Iterator[Tensor]:
    """The plain tensors in `holder`, gradients and optimizer states included.

    Args:
        holder: a tensor, module, optimizer, or a dict, list, tuple, set or dataclass of such.
    """
    return _tensors_in(holder, {})


def tensors_by_kind(
    model: nn.Module, optimizers: Iterable[Optimizer] = ()
) -> Iterator[tuple[str, Tensor]]:
    """(kind, plain tensor) of all that a training holds: "parameters", "gradients", "buffers" and
    "optimizer_states". A sharded tensor is its local part."""
    optimizers = list(optimizers)
    parameters = list(model.parameters())
    known = {id(parameter) for parameter in parameters}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            parameters += [p for p in group["params"] if id(p) not in known]
    for parameter in parameters:
        yield from (("parameters", plain) for plain in _plain(parameter))
    yield from (("gradients", gradient) for gradient in gradients_of(parameters))
    for buffer in model.buffers():
        yield from (("buffers", plain) for plain in _plain(buffer))
    for optimizer in optimizers:
        yield from (
            ("optimizer_states", state) for state in tensors_in(list(optimizer.state.values()))
        )


def gradients_of(parameters: Iterable[Tensor]) -> Iterator[Tensor]:
    """The gradients that `parameters` have now."""
    for parameter in parameters:
        if parameter.grad is not None:
            yield from _plain(parameter.grad)


def wraps_tensors(kind: Any) -> bool:
    """Whether it is a wrapper subclass, by the protocol that `torch.compile` asks of them. DTensor
    and the like go first, and come back to a dispatch mode with operations on plain tensors."""
    return hasattr(kind, "__tensor_flatten__")


def parts_of(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that a sparse tensor is made of; of an opaque layout nothing is known."""
    if tensor.layout == torch.sparse_coo:
        return list(coo_parts(tensor))
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def storages_of(tensor: Tensor) -> list[torch.UntypedStorage]:
    """The storage of a plain tensor, or those of a sparse tensor's parts."""
    try:
        return [tensor.untyped_storage()]
    except RuntimeError:
        return [storage for part in parts_of(tensor) for storage in storages_of(part)]


def _tensors_in(holder: Any, seen: dict[int, Any]) -> Iterator[Tensor]:
    if id(holder) in seen:
        return
    seen[id(holder)] = holder
    if isinstance(holder, Tensor):
        yield from _plain(holder)
        if holder.is_leaf and holder.grad is not None:
            yield from _plain(holder.grad)
        return
    for item in _items(holder):
        yield from _tensors_in(item, seen)


def _plain(tensor: Tensor) -> Iterator[Tensor]:
    """A wrapper subclass (DTensor) has the size of the whole; what it holds here is inside it."""
    if is_lazy(tensor):  # has no memory yet
        return
    if wraps_tensors(type(tensor)):
        names, _ = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, Tensor):
                yield from _plain(inner)
    else:
        yield tensor


def _items(holder: Any) -> Iterator[Any]:
    if isinstance(holder, nn.Module):
        yield from holder.parameters()
        yield from holder.buffers()
    elif isinstance(holder, Optimizer):
        yield holder.param_groups
        yield holder.state
    elif isinstance(holder, Mapping):
        yield from holder.values()
    elif isinstance(holder, (Sequence, Set)) and not isinstance(holder, (str, bytes)):
        yield from holder
    elif dataclasses.is_dataclass(holder) and not isinstance(holder, type):
        yield from vars(holder).values()
