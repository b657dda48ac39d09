"""Whether two values are the same, bit by bit: what `verify` holds against each other."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_ckpt.core.generators import is_same

ABSENT: Any = object()  # where there is no value


class GeneratorState(NamedTuple):
    """Where a random stream stands."""

    state: Any


def is_equal(one: Any, other: Any) -> bool:
    """Whether two values of `Snapshot.changes` are equal, bit by bit; NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return is_equal_tensor(one, other)
    if isinstance(one, GeneratorState) and isinstance(other, GeneratorState):
        return is_same(one.state, other.state)
    if is_array(one) or is_array(other):
        return type(one) is type(other) and one.tobytes() == other.tobytes()
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


_KINDS = ("shape", "dtype", "layout", "device")


def is_equal_tensor(one: Tensor, other: Tensor) -> bool:
    if any(getattr(one, name) != getattr(other, name) for name in _KINDS):
        return False
    if one.layout != torch.strided:
        return torch.equal(one.to_dense(), other.to_dense())
    one, other = one.detach(), other.detach()
    if one.dtype.itemsize == 1:  # 8-bit floats know no comparison
        one, other = one.view(torch.uint8), other.view(torch.uint8)
    if torch.equal(one, other):
        return True
    if not (one.is_floating_point() or one.is_complex()):
        return False
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"
