"""Gradients that a failed backward has summed up in part, completed by the next try.

A backward adds to each parameter's `.grad` once, when all of the parameter's uses are done. Where
it fails halfway, some parameters have their part and the others do not. A gradient that was not
there before is dropped. One that was (of earlier micro-batches, or of a parameter that no optimizer
zeroes) cannot be made smaller by what was added, not to the bit; so in the next try that parameter
gets nothing more: a hook gives -0.0, and `x + -0.0` is `x` for every `x`.
"""

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_ckpt.core._torch import tensor_version


class CannotRepeat(Exception):
    """A parameter gets its gradient in several parts in one step: by several backward calls."""

    def __init__(self) -> None:
        super().__init__("a gradient comes in several parts, by several backward calls")


class _Sum(NamedTuple):
    """A parameter, and its gradient before backward."""

    parameter: Tensor
    grad: Tensor | None
    version: int


class GradientSums:
    """The gradients of a step over its tries: call `begin_try`, then `begin_backward` right before
    backward; after a success `check`; after a failure look at `obstacle`, then `drop`; `end` in any
    case.

    Args:
        parameters: all that may get a gradient.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(dict.fromkeys(parameters))
        self._sums: list[_Sum] = []
        self._in_backward = False
        # Those that have the part of this step by now, with the version that their sum then had.
        self._have_part: dict[Tensor, tuple[Tensor, int]] = {}
        self._num_given: dict[Tensor, int] = {}  # of those, how often this try gave them nothing
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def begin_try(self) -> None:
        """The step is tried, or tried again."""
        self._in_backward = False
        self._note()

    def begin_backward(self) -> None:
        """Gradients were zeroed if they are to be, and flow now."""
        self._note()
        self._in_backward = True
        for parameter, (grad, version) in list(self._have_part.items()):
            if parameter.grad is not grad or tensor_version(grad) != version:
                del self._have_part[parameter]  # zeroed once more: it gets its part anew
                continue
            self._num_given[parameter] = 0
            self._hooks.append(parameter.register_hook(partial(self._give_nothing, parameter)))

    def obstacle(self) -> str | None:
        """What the failed try did that cannot be undone, in words; None if all can."""
        for before in self._sums:
            grad = before.parameter.grad
            if before.grad is None or _is_untouched(before):
                continue
            added_once = grad is before.grad and tensor_version(grad) == before.version + 1
            if not (self._in_backward and added_once and _is_plain(before)):
                shape = tuple(before.parameter.shape)
                return f"the gradient of a parameter of shape {shape} was changed more than once"
        return None

    def drop(self) -> None:
        """Take back what the failed try added, or note that it is there."""
        self._remove_hooks()
        for before in self._sums:
            if before.grad is None:
                before.parameter.grad = None
            elif not _is_untouched(before):
                part = before.grad, tensor_version(before.grad)
                self._have_part[before.parameter] = part
        self._sums = []

    def check(self) -> None:
        """The try was a success: make sure that it gave each gradient once.

        Raises:
            CannotRepeat: it did not.
        """
        if any(number != 1 for number in self._num_given.values()):
            raise CannotRepeat

    def end(self) -> None:
        """Leave nothing on the parameters."""
        self._remove_hooks()
        self._sums = []
        self._have_part = {}

    def _note(self) -> None:
        pairs = ((parameter, parameter.grad) for parameter in self._parameters)
        self._sums = [
            _Sum(parameter, grad, 0 if grad is None else tensor_version(grad))
            for parameter, grad in pairs
        ]

    def _give_nothing(self, parameter: Tensor, grad: Tensor) -> Tensor:
        self._num_given[parameter] += 1
        nothing = complex(-0.0, -0.0) if grad.is_complex() else -0.0
        return grad.new_full((), nothing).expand(grad.shape)

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._num_given = {}


def _is_untouched(before: _Sum) -> bool:
    grad = before.grad
    return before.parameter.grad is grad and tensor_version(grad) == before.version  # type: ignore[arg-type]


def _is_plain(before: _Sum) -> bool:
    """Whether `-0.0` can be added to it: sparse and sharded gradients are summed otherwise."""
    grad = before.grad
    is_strided = type(grad) is Tensor and grad.layout == torch.strided
    return is_strided and grad is not None and not grad.requires_grad
