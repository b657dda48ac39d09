"""Dispatch modes that begin and end in any order."""

import os

from lightning_ckpt.core._torch import TorchDispatchMode


class StackedMode(TorchDispatchMode):
    """A mode that looks at operations between `enter` and `leave`.

    Torch takes off whatever mode is on top, so two that end in the order in which they began would
    take off each other: the lower one stays there, idle, until it is on top.
    """

    # Without it torch refuses higher-order operators (`torch.cond`, flex attention) in here.
    supports_higher_order_operators = True
    on = False

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let a compiled function that could not be seen beforehand run compiled: the figure then
        misses its temporaries, but the training is the same. Older torch does not ask.
        """
        return True

    def enter(self) -> None:
        if self not in _entered:
            self.__enter__()
            _entered.append(self)
        self.on = True

    def leave(self) -> None:
        self.on = False
        while _entered and not _entered[-1].on:
            _entered.pop().__exit__(None, None, None)


_entered: list[StackedMode] = []  # those on torch's stack, the lowest first


def _idle_after_fork() -> None:
    """A process that is forked in here (a data loader's worker) has its own copy of the modes."""
    for mode in _entered:
        mode.on = False


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_idle_after_fork)
