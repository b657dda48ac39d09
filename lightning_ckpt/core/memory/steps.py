"""The memory of training steps, added up over an epoch, from exchangeable sources.

source = step_source("cpu", model)
for batch in epoch:
    source.begin(model, [optimizer], batch)
    loss = model(batch)
    source.forward_ended()
    loss.backward()
    source.backward_ended()
    optimizer.step()
    source.end()
print(source.figures.peak, source.figures.parts)
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import Optimizer

from lightning_ckpt.core.memory.breakdown import Event, Marks, StepFigures, read_events
from lightning_ckpt.core.memory.holders import gradients_of, tensors_by_kind
from lightning_ckpt.core.memory.live_bytes import LiveBytes


@dataclass
class EpochFigures:
    """Bytes of the steps since the last reset.

    Attributes:
        peak: the most that was live at once in any step.
        parts: what was live at that moment, by `breakdown.PARTS`.
        activations: held for backward when forward ended, the maximum; None: no backward was seen.
        reserved: the most that the allocator held at once, None where there is none.
        num_steps: how many steps were followed to their end.
    """

    peak: int = 0
    parts: dict[str, int] = field(default_factory=dict)
    activations: int | None = None
    reserved: int | None = None
    num_steps: int = 0

    def add(self, step: StepFigures) -> None:
        """Take one more step in."""
        self.num_steps += 1
        if step.peak > self.peak:
            self.peak, self.parts = step.peak, step.parts
        if step.activations is not None:
            self.activations = max(self.activations or 0, step.activations)


class StepSource(ABC):
    """Follows steps. A step that is not ended (an exception) leaves no figure.

    Attributes:
        name: where the figures come from, for people.
        has_events: whether it keeps `events`.
        allows_hooks: whether forward hooks may be laid on modules while it measures.
        figures: of the steps since the last reset.
        events: of the last step, in order; empty where nothing keeps them.
    """

    name: str
    has_events = True
    allows_hooks = True

    def __init__(self) -> None:
        self.figures = EpochFigures()
        self.events: Sequence[Event] = ()

    def reset(self) -> None:
        """An epoch begins."""
        self.figures = EpochFigures()

    @abstractmethod
    def begin(self, model: nn.Module, optimizers: Sequence[Optimizer], batch: Any) -> None:
        """A step begins; `batch` is what it was given.

        Raises:
            PeakUnavailable: something is in the way that would make the figure wrong.
        """

    @abstractmethod
    def forward_ended(self) -> None:
        """Backward begins. May come several times in a step, or not at all."""

    @abstractmethod
    def backward_ended(self) -> None:
        """Backward is over, and gradients lie on the parameters."""

    @abstractmethod
    def end(self) -> None:
        """The step is over: take it into the figures.

        Raises:
            PeakUnavailable: something was in the way, and the step has no figure.
        """

    @abstractmethod
    def abandon(self) -> None:
        """The step, if one is on, gets no figure."""

    @abstractmethod
    def stop(self) -> None:
        """Let go of everything but the figures; also in the middle of a step."""

    @property
    @abstractmethod
    def current_bytes(self) -> int:
        """The bytes that are live now, as far as they are known."""


class LiveSteps(StepSource):
    """Live tensor bytes on a CPU, by a dispatch mode (see `live_bytes.py`)."""

    name = "live tensors"

    def __init__(self) -> None:
        super().__init__()
        self._live = LiveBytes()
        self._marks = Marks()

    def begin(self, model: nn.Module, optimizers: Sequence[Optimizer], batch: Any) -> None:
        self._live.pause()
        self._model, self._optimizers = model, optimizers
        self._name_all()
        self._live.reset_peak(batch)
        self._recorded = self._live.record()
        self._marks = Marks(len(self._recorded))
        self._live.resume()

    def forward_ended(self) -> None:
        self._marks.forward_ends.append(len(self._recorded))

    def backward_ended(self) -> None:
        for gradient in gradients_of(self._model.parameters()):
            self._live.name("gradients", gradient)
        self._marks.backward_ends.append(len(self._recorded))

    def end(self) -> None:
        self._live.pause()
        self._name_all()
        self._live.end_record()
        self.events = self._recorded
        self.figures.add(read_events(self.events, self._marks))

    def abandon(self) -> None:
        self._live.pause()
        self._live.end_record()

    def stop(self) -> None:
        self.abandon()
        self._live.stop()

    @property
    def current_bytes(self) -> int:
        return self._live.current_bytes

    def _name_all(self) -> None:
        for kind, tensor in tensors_by_kind(self._model, self._optimizers):
            self._live.name(kind, tensor)
