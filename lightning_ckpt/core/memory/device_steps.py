"""The memory of training steps on an accelerator, by its allocator's own counters."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_ckpt.core.memory.allocator import AllocatorPeak, Counters
from lightning_ckpt.core.memory.breakdown import KINDS, StepFigures
from lightning_ckpt.core.memory.holders import gradients_of, storages_of, tensors_by_kind
from lightning_ckpt.core.memory.peak import PeakUnavailable
from lightning_ckpt.core.memory.steps import StepSource

_FORWARD, _BACKWARD, _UPDATE = range(3)


class DeviceSteps(StepSource):
    """Peaks as torch's allocator counted them: exact, and nothing runs in between.

    The counter has no memory of when its peak was, so it is read when forward ends and when
    backward ends. The parts are those of the stretch in which the peak fell: gradients as they were
    when it began, so that what backward adds to them before the peak is among "other".

    Args:
        device: the accelerator.
        counters: what to read, by default what torch has for `device`.

    Raises:
        PeakUnavailable: there is nothing that keeps a peak for `device`.
    """

    name = "allocator"
    has_events = False

    def __init__(self, device: torch.device, counters: Counters | None = None) -> None:
        super().__init__()
        self._device = device
        self._peak = AllocatorPeak(device, counters)
        self._known: dict[str, int] | None = None

    def reset(self) -> None:
        super().reset()
        self._peak.reset_peak()
        self._known = None
        self._parameters: list[Tensor] = []

    def begin(self, model: nn.Module, optimizers: Sequence[Optimizer], batch: Any) -> None:
        self._model, self._optimizers = model, optimizers
        self._activations: int | None = None
        self._stretch = _FORWARD
        self._peaked_in: int | None = None
        if self._known is None:  # later it is what the step before left
            self._known = self._measure()
            self._parameters = list(model.parameters())
        self._gradients = [self._gradient_bytes()]
        self._highest = self.figures.peak
        self._peak.resume()
        self._start = self._peak.current_bytes

    def forward_ended(self) -> None:
        self._look()
        self._gradients.append(self._gradient_bytes())
        # Old gradients may have gone in the middle.
        gone = self._gradients[0] - self._gradients[-1]
        held = self._peak.current_bytes - self._start + gone
        self._activations = max(self._activations or 0, held)
        self._stretch = _BACKWARD

    def backward_ended(self) -> None:
        self._look()
        self._gradients.append(self._gradient_bytes())
        self._stretch = _UPDATE

    def end(self) -> None:
        self._peak.pause()
        self._look()
        if (reserved := self._peak.reserved_bytes) is not None:
            self.figures.reserved = max(self.figures.reserved or 0, reserved)
        parts = self._parts() if self._peaked_in is not None else {}
        self.figures.add(StepFigures(self._highest, parts, self._activations))

    def abandon(self) -> None:
        self._peak.pause()

    def stop(self) -> None:
        self._peak.stop()

    @property
    def current_bytes(self) -> int:
        return self._peak.current_bytes

    def _look(self) -> None:
        """Note in which stretch the highest peak so far fell."""
        peak = self._peak.peak_bytes
        if self._peak.was_disturbed:
            raise PeakUnavailable(
                "something resets the device's peak statistics inside a training step, which hides "
                "the step's peak; if it is a callback, put it after this one in `callbacks=[...]`"
            )
        if peak > self._highest:
            self._highest = peak
            self._peaked_in, self._gradients_then = self._stretch, self._gradients[-1]

    def _parts(self) -> dict[str, int]:
        before, self._known = self._known or {}, self._measure()
        held: dict[str, int] = self._known if self._peaked_in == _UPDATE else before
        parts = {**held, "gradients": self._gradients_then}
        rest = self._highest - sum(parts.values())
        made = 0 if self._peaked_in == _UPDATE else min(self._activations or 0, rest)
        return {**parts, "activations": made, "other": rest - made}

    def _measure(self) -> dict[str, int]:
        """Bytes on the device by kind, gradients left out."""
        kinds: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
        for kind, tensor in tensors_by_kind(self._model, self._optimizers):
            kinds[kind].append(tensor)
        return {
            kind: 0 if kind == "gradients" else self._bytes(held) for kind, held in kinds.items()
        }

    def _gradient_bytes(self) -> int:
        """Bytes of the gradients on the device. (This runs in each step: plain ones are not looked
        at closely.)"""
        total = 0
        for parameter in self._parameters:
            gradient = parameter.grad
            if gradient is None:
                continue
            if type(gradient) is Tensor and gradient.layout == torch.strided:
                total += gradient.nbytes if self._is_here(gradient.device) else 0
            else:
                total += self._bytes(gradients_of([parameter]))
        return total

    def _is_here(self, device: torch.device) -> bool:
        own = self._device
        return device.type == own.type and own.index in (None, device.index)

    def _bytes(self, tensors: Iterable[Tensor]) -> int:
        storages = {
            storage.data_ptr(): storage.nbytes()
            for tensor in tensors
            for storage in storages_of(tensor)
            if self._is_here(storage.device)
        }
        return sum(storages.values())
