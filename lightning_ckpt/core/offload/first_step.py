"""Look at one step: what was offloaded, and when the memory was highest."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lightning_ckpt.core.memory import peak_tracker
from lightning_ckpt.core.memory.peak import PeakUnavailable
from lightning_ckpt.core.offload.engine import Offloader
from lightning_ckpt.core.offload.report import OffloadReport


def watch_first_step(
    offloader: Offloader, device: torch.device, *holders: Any
) -> Callable[[], OffloadReport]:
    """Begin to watch a step.

    On a CPU its operations are followed, which makes this one step slower; on a device the
    allocator's peak is read, and reset once.

    Args:
        offloader: what is in force.
        device: where the training runs.
        holders: what holds tensors already: modules, optimizers, a batch.

    Returns:
        Ends the watch, and gives the report. Where no peak can be had the report has none.
    """
    modules = [holder for holder in holders if isinstance(holder, nn.Module)]
    tracker = None
    with suppress(PeakUnavailable):
        tracker = peak_tracker(device, *modules)
        tracker.resume(*holders)
        offloader.watch_peak(lambda: tracker.peak_bytes)

    def end() -> OffloadReport:
        offloader.watch_peak(None)
        if tracker is not None:
            tracker.stop()
        return offloader.report()

    return end
