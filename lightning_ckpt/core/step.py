"""One step of training, run again and again from the same state, and what it leaves behind."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_ckpt.core.arguments import flatten
from lightning_ckpt.core.blocks import Block
from lightning_ckpt.core.loss import check_loss
from lightning_ckpt.core.memory import peak_tracker
from lightning_ckpt.core.memory.peak import PeakTracker, PeakUnavailable
from lightning_ckpt.core.report import What
from lightning_ckpt.core.sameness import ABSENT, GeneratorState
from lightning_ckpt.core.snapshot import Snapshot
from lightning_ckpt.core.watchers import counted_recomputes

Loss = Callable[[nn.Module, Any], Any]
Key = tuple[What, str]


class Moment(NamedTuple):
    """Tensors, by their sums, that go into a block or come out of it."""

    block: str
    comes_out: bool
    sums: tuple[float, ...]


class Result(NamedTuple):
    """What a step leaves behind.

    Attributes:
        error: what it raised, if it did.
        values: the loss, each gradient (`ABSENT` where there is none), and what changed of state
            and generators.
        recomputes: how often each block was computed again.
        peak_bytes: the most bytes live at once beyond those at the start, None if nobody knows.
    """

    error: Exception | None
    values: dict[Key, Any]
    recomputes: Counter[nn.Module]
    peak_bytes: int | None


class Step(NamedTuple):
    """A step of `module` on `batch`, from the state in `start`."""

    module: nn.Module
    batch: Any
    loss: Loss
    start: Snapshot

    def run(self, around: Callable[[], Any] = nullcontext) -> Result:
        """Run it in the context that `around` makes."""
        self.start.restore()
        values: dict[Key, Any] = {}
        error = None
        with counted_recomputes() as counts, around(), _tracking(self.module, self.batch) as peak:
            try:
                values.update(self._learn())
            except Exception as caught:
                error = caught.with_traceback(None)  # its frames hold activations
        for path, value in self.start.changes().items():
            what: What = "generator" if isinstance(value, GeneratorState) else "state"
            values[what, path.removeprefix(".")] = value
        return Result(error, values, counts, peak() if peak else None)

    def trace(self, blocks: Sequence[Block]) -> list[Moment]:
        """What goes into each block and comes out of it, in the order of a plain step."""
        moments: list[Moment] = []
        self.run(lambda: _listening(blocks, moments))
        return moments

    def _learn(self) -> Iterator[tuple[Key, Any]]:
        torch.clear_autocast_cache()  # or casts of weights would stay, with a graph that is gone
        loss = self.loss(self.module, self.batch)
        check_loss(loss)
        learning = {n: p for n, p in self.module.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss.sum(), list(learning.values()), allow_unused=True)
        torch.clear_autocast_cache()
        yield ("loss", "loss"), loss.detach().clone()
        for name, gradient in zip(learning, gradients, strict=True):
            yield ("gradient", name), ABSENT if gradient is None else gradient


@contextmanager
def _tracking(module: nn.Module, batch: Any) -> Iterator[Callable[[], int] | None]:
    tracker = _tracker(module)
    if tracker is None:
        yield None
        return
    try:
        tracker.reset_peak(module, batch)
        before = tracker.current_bytes
        tracker.resume()
        yield lambda: tracker.peak_bytes - before
    finally:
        tracker.stop()


def _tracker(module: nn.Module) -> PeakTracker | None:
    parameter = next(module.parameters(), None)
    try:
        return peak_tracker("cpu" if parameter is None else parameter.device, module)
    except PeakUnavailable:
        return None


class _Listener:
    """Notes what passes a block, in forward and in backward."""

    def __init__(self, block: Block, moments: list[Moment]) -> None:
        self._name = block.name
        self._moments = moments
        self.hooks = [
            block.module.register_forward_pre_hook(self._on_call, with_kwargs=True),
            block.module.register_forward_hook(self._on_result),
        ]

    def _on_call(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._note((args, kwargs), is_result=False)

    def _on_result(self, module: nn.Module, args: Any, result: Any) -> None:
        self._note(result, is_result=True)

    def _note(self, value: Any, is_result: bool) -> None:
        tensors = flatten(value).tensors
        self._moments.append(Moment(self._name, is_result, tuple(map(_sum, tensors))))

        def on_gradient(gradient: Tensor) -> None:
            # Backward comes the other way: what leaves the block is the gradient of its input.
            self._moments.append(Moment(self._name, not is_result, (_sum(gradient),)))

        self.hooks += [t.register_hook(on_gradient) for t in tensors if t.requires_grad]


@contextmanager
def _listening(blocks: Sequence[Block], moments: list[Moment]) -> Iterator[None]:
    listeners = [_Listener(block, moments) for block in blocks]
    try:
        yield
    finally:
        for listener in listeners:
            for hook in listener.hooks:
                hook.remove()


def _sum(tensor: Tensor) -> float:
    return float(tensor.detach().abs().double().sum().nan_to_num())
