"""A model and a batch without values: shapes alone, whatever their size.

Note: [Whole numbers keep their values]
Models look into what a batch says: whether a mask hides anything, where a new sample begins, how
many places an image has. On tensors without values they take another way, and Transformers then
makes masks that a real step does not have. So whatever follows from whole numbers alone has values,
as long as it is small; what a parameter or an activation goes into has none.

Note: [A product that says no shape]
Without values torch (2.13) multiplies the groups of a mixture of experts in bfloat16 alone, though
with values it takes others.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_ckpt.core._torch import (
    GROUPED_PRODUCTS,
    FakeTensorMode,
    TorchDispatchMode,
    changes_arguments,
    depends_on_values,
    has_known_values,
    is_fake,
    without_fake_mode,
)
from lightning_ckpt.core.arguments import flatten, tensors_of

_MOST_BYTES = 2**26  # of a result with values; larger ones are masks of very long sequences


@contextmanager
def without_values() -> Iterator[None]:
    """Let operations give tensors without values: Note: [Whole numbers keep their values]."""
    with FakeTensorMode(allow_non_fake_inputs=True), _WholeNumbers():
        yield


def fake_module(module: nn.Module) -> nn.Module:
    """A copy without values, but of buffers of whole numbers."""
    memo: dict[int, Any] = {}
    for tensor in chain(module.parameters(), module.buffers()):
        memo[id(tensor)] = _bare(tensor)
    return copy.deepcopy(module, memo)


def fake_batch(batch: Any) -> Any:
    """A copy in which whole numbers alone have values, if they had."""
    flat = flatten(batch)
    return flat.build([_bare(tensor) for tensor in flat.tensors])


def _bare(tensor: Tensor) -> Tensor:
    if _is_whole(tensor) and not is_fake(tensor):
        with without_fake_mode():
            return tensor.detach().to("cpu", copy=True)
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def _is_whole(value: Any) -> bool:
    """Whether it is a tensor of whole numbers or of truths."""
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


class _WholeNumbers(TorchDispatchMode):
    """Computes what no tensor without values goes into. Lies over the mode that makes those."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in GROUPED_PRODUCTS and args[0].dtype != torch.bfloat16:
            return _grouped_product(*args, **kwargs)
        given = tensors_of((args, kwargs))
        if not has_known_values(func) or any(map(is_fake, given)):
            return func(*args, **kwargs)
        # Those that change what they are given take no memory, and must do so once.
        if not (depends_on_values(func) or changes_arguments(func)):
            made = tensors_of(func(*args, **kwargs))
            is_small = sum(tensor.untyped_storage().nbytes() for tensor in made) <= _MOST_BYTES
            if not is_small or not (given or all(map(_is_whole, made))):
                return func(*args, **kwargs)
        with without_fake_mode():
            return func(*args, **kwargs)


def _grouped_product(
    a: Tensor,
    b: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Note: [A product that says no shape]. Where both are flat, `offs` ends the groups of rows."""
    shape = [a.shape[-2], b.shape[-1]]
    if a.dim() == b.dim():
        shape.insert(0, a.shape[0] if a.dim() == 3 or offs is None else offs.shape[0])
    return a.new_empty(shape, dtype=out_dtype)
