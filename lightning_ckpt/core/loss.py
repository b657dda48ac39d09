"""The loss of one step of any model, where nobody says how to get it."""

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from lightning_ckpt.core.arguments import flatten


def model_loss(module: nn.Module, batch: Any, *, argument: str = "loss") -> Tensor:
    """Call the model, and take the loss out of what it gives.

    Args:
        module: any model.
        batch: a mapping is passed as keyword arguments, a tuple or list as positional ones,
            anything else as the one argument.
        argument: how the caller's argument is called that says it otherwise.

    Returns:
        The output's own `loss` if it has one, the output if that is one element, else the mean
        square of all tensors in it that need a gradient.

    Raises:
        ValueError: there is no such tensor.
    """
    if isinstance(batch, Mapping):
        output = module(**batch)
    elif isinstance(batch, (tuple, list)):
        output = module(*batch)
    else:
        output = module(batch)
    own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(own, Tensor):
        return own
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    tensors = [t for t in flatten(output).tensors if t.requires_grad]
    if not tensors:
        raise ValueError(
            f"the output of {type(module).__name__}, a {type(output).__name__}, has no tensor that "
            f"needs a gradient; pass {argument}=lambda module, batch: ..."
        )
    return sum((t.abs().float().pow(2).mean() for t in tensors), start=tensors[0].new_zeros(()))


def check_loss(loss: Any, *, argument: str = "loss") -> None:
    """Refuse what backward cannot begin at.

    Args:
        loss: what the caller's `argument` gave.

    Raises:
        ValueError: it is no tensor of one element that needs a gradient.
    """
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.requires_grad:
        return
    got = repr(loss)
    if isinstance(loss, Tensor):  # its numbers would fill the screen
        without = "" if loss.requires_grad else " that needs none"
        got = f"a tensor of shape {tuple(loss.shape)}{without}"
    raise ValueError(
        f"the loss must be a tensor of one element that needs a gradient, got {got}; "
        f"pass {argument}=lambda module, batch: ..."
    )


def check_function(argument: str, value: Any, example: str) -> None:
    """Refuse what is no function, such as a criterion in place of a whole loss.

    Raises:
        TypeError: it cannot be called, or is a module.
    """
    if value is not None and (not callable(value) or isinstance(value, nn.Module)):
        raise TypeError(
            f"{argument} must be a function, got {value!r}; pass {argument}=lambda {example}"
        )


def why_no_training_step(module: Any) -> str | None:
    """Why a LightningModule's `training_step` cannot be run by itself, or None."""
    if not getattr(module, "automatic_optimization", True):
        return "optimizes by hand"
    return "takes a dataloader_iter" if takes_dataloader_iter(module) else None


def takes_dataloader_iter(module: Any) -> bool:
    """Whether a LightningModule's `training_step` fetches its batches itself."""
    return "dataloader_iter" in inspect.signature(module.training_step).parameters


def training_step_loss(module: Any, batch: Any, batch_idx: int = 0) -> Any:
    """Run a LightningModule's `training_step`, and take the loss out of what it gives.

    As in the trainer's loop, a second parameter is the batch's index, whatever its name.
    """
    parameters = inspect.signature(module.training_step).parameters.values()
    takes_index = len(parameters) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters)
    output = module.training_step(batch, *((batch_idx,) if takes_index else ()))
    return output.get("loss") if isinstance(output, Mapping) else output
