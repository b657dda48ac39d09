"""What is said of checkpointed blocks that `torch.compile` meets, while it makes the graph."""

import warnings

import torch
from torch import nn

from lightning_ckpt.core._torch import BATCH_STATISTICS, compiler_memory_budget

_STATISTICS_COMPILE = torch.__version__ >= "2.13"  # not tried in between; compared as a version


def changeable_buffers(module: nn.Module) -> tuple[str, ...]:
    """Names of buffers that the block might change in place, to a wrong result in compiled code.

    Batch statistics are right there with torch 2.13; torch 2.8 updates them twice. Any other buffer
    is updated once, but the recompute sees the new value (torch 2.8 to 2.13, every backend).
    Whether it will be changed cannot be told beforehand, so index tables and masks of whole numbers
    are passed over. (Dynamo runs this.)
    """
    names = []
    for prefix, child in module.named_modules():
        if not (_STATISTICS_COMPILE and isinstance(child, BATCH_STATISTICS)):
            for name, buffer in child._buffers.items():
                if buffer is not None and (buffer.is_floating_point() or buffer.dim() == 0):
                    names.append(f"{prefix}.{name}" if prefix else name)
    return tuple(names)


# The functions below run while the graph is made. They must not take the module: that would tie the
# graph to one block.


@torch.compiler.assume_constant_result
def warn_of_offload(class_name: str) -> None:
    """Say that a block of this class is not compiled, and why."""
    warnings.warn(
        f"{class_name} is compiled from outside and offloaded: it runs in eager, since what "
        "compiled code saves for backward cannot be moved; compile what is inside of the block, or "
        "leave such blocks without offload",
        stacklevel=2,
    )


@torch.compiler.assume_constant_result
def warn_of_buffers(class_name: str, names: tuple[str, ...]) -> None:
    warnings.warn(
        f"{class_name} is compiled and checkpointed, and has buffers ({', '.join(names)}): if its "
        "forward changes one of them in place, the recompute sees the changed value (and torch "
        "before 2.13 changes batch statistics twice), so training differs; leave such blocks out "
        "of torch.compile or out of layers=. Constant buffers are fine",
        stacklevel=2,
    )


@torch.compiler.assume_constant_result
def warn_of_memory_budget() -> None:
    budget = compiler_memory_budget()
    if budget < 1:
        warnings.warn(
            f"torch's activation_memory_budget is {budget}: below 1 the compiler recomputes by "
            "itself, and draws dropout and other random numbers anew, so gradients are wrong where "
            "there are any (pytorch#190758); set it to 1, since the blocks are checkpointed anyway",
            stacklevel=2,
        )
