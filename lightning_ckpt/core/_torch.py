"""Every private torch name that we touch, and why.

Public torch has no way to do these things. Each name has a test that fails when it moves.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo.eval_frame import OptimizedModule
from torch.distributed._composable.contract import _get_registry
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel

# The base class of every dispatch mode; there is no public spelling of it.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BATCH_STATISTICS",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "TorchDispatchMode",
    "checkpointed_by_torch",
    "coo_parts",
    "fsdp_names",
    "is_compiled",
    "is_fake",
    "tensor_version",
    "view_base",
]

# BatchNorm and InstanceNorm of every dimension share this base and no public one.
BATCH_STATISTICS = nn.modules.batchnorm._NormBase


def checkpointed_by_torch(module: nn.Module) -> str | None:
    """Name the torch API that makes `module` checkpoint itself, or None.

    `checkpoint_wrapper` puts a module around it; the composable `checkpoint` leaves an entry in the
    module's contract registry and nothing else that could be seen.
    """
    if isinstance(module, CheckpointWrapper):
        return "checkpoint_wrapper"
    if "checkpoint" in (_get_registry(module) or ()):
        return "the composable checkpoint API"
    return None


def tensor_version(tensor: Tensor) -> int:
    """How often `tensor` was changed in place, as autograd counts it (inference tensors: 0)."""
    return 0 if tensor.is_inference() else tensor._version


def view_base(tensor: Tensor) -> Tensor:
    """The tensor that `tensor` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` has no values (meta device, or a fake tensor of the compiler's)."""
    if type(tensor) is nn.Parameter:  # soon told; a fake one is of another class
        return tensor.is_meta
    return tensor.is_meta or torch._subclasses.fake_tensor.is_fake(tensor)


def coo_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a COO tensor (the public way demands that it is coalesced)."""
    return tensor._indices(), tensor._values()


def fsdp_names(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Where the FSDP (version 1) units among `modules` put parts of their flat parameter: the
    module, and the name under which it is an attribute or a parameter by turns."""
    for unit in modules:
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            flat: Any = unit._handle.flat_param
            for info in (*flat._param_infos, *flat._shared_param_infos):
                yield info.module, info.param_name
            yield unit.module, "_flat_param"


def is_compiled(value: Any) -> bool:
    """Whether `value` is a function or bound method that `torch.compile` made."""
    return (
        callable(value)
        and hasattr(value, "_torchdynamo_orig_callable")
        and not getattr(value, "_torchdynamo_disable", False)
    )
