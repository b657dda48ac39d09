"""What to say of blocks that `torch.compile` meets."""

import warnings

import torch


# Runs while the graph is made. It must not take the module: that would tie the graph to one block.
@torch.compiler.assume_constant_result
def warn_of_offload(class_name: str) -> None:
    """Say that a block of this class is not compiled, and why."""
    warnings.warn(
        f"{class_name} is compiled from outside and offloaded: it runs in eager, since what "
        "compiled code saves for backward cannot be moved; compile what is inside of the block, or "
        "leave such blocks without offload",
        stacklevel=2,
    )
