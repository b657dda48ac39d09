"""Peak memory of a stretch of training: live tensor bytes on CPU, the allocator's peak on a device.

On CPU nothing keeps such a figure (resident memory does not: the allocator keeps freed pages, so a
second step shows no new peak). So a dispatch mode looks at what each operation returns, counts each
storage once, and a weak reference on the storage tells of its end. Views, in-place operations,
`no_grad`, backward and the recompute of a checkpoint need nothing special, and equal steps give
the same figure to the byte. What it does not see: memory that an operation takes and gives back
inside its kernel; storages that nothing named and no operation touched; and the new size of a
storage that was resized by itself (sharding strategies do so), until an operation touches it.

    with track_peak(model, optimizer, batch) as tracker:
        training_step()
    print(tracker.peak_bytes / 2**20, "MiB")
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lightning_ckpt.core._torch import OptimizedModule, is_compiled
from lightning_ckpt.core.memory.allocations import AllocationSteps
from lightning_ckpt.core.memory.allocator import AllocatorPeak
from lightning_ckpt.core.memory.device_steps import DeviceSteps
from lightning_ckpt.core.memory.live_bytes import LiveBytes
from lightning_ckpt.core.memory.peak import PeakTracker, PeakUnavailable
from lightning_ckpt.core.memory.steps import LiveSteps, StepSource


def step_source(device: torch.device | str, *modules: nn.Module) -> StepSource:
    """Make what follows training steps on `device`.

    On a CPU it is a dispatch mode; where something in `modules` is compiled it is the allocation
    events of torch's profiler, since compiled code would run uncompiled under a mode.

    Args:
        device: where the training runs.
        modules: all that will be run while it measures.

    Raises:
        PeakUnavailable: the device keeps no peak (MPS, devices that torch does not know).
    """
    device = torch.device(device)
    if device.type != "cpu":
        return DeviceSteps(device)
    if any(map(find_compiled, modules)):
        return AllocationSteps()
    return LiveSteps()


def peak_tracker(device: torch.device | str, *modules: nn.Module) -> PeakTracker:
    """Make the tracker that fits `device`.

    Args:
        device: where the training runs.
        modules: all that will be run while it measures.

    Raises:
        PeakUnavailable: the device keeps no peak (MPS, devices that torch does not know), or it
            is a CPU and something in `modules` is compiled: under a dispatch mode such code runs
            uncompiled, and stays so when it is called there for the first time, or runs unseen.
    """
    device = torch.device(device)
    if device.type != "cpu":
        return AllocatorPeak(device)
    for module in modules:
        if compiled := find_compiled(module):
            raise PeakUnavailable(
                f"{compiled} is compiled, and on a CPU the tensors of compiled code cannot be "
                "followed; measure without `torch.compile`"
            )
    return LiveBytes()


@contextmanager
def track_peak(*holders: Any, device: torch.device | str = "cpu") -> Iterator[PeakTracker]:
    """Measure the peak of a block of code, with the tensors in `holders` counted in.

    Raises:
        PeakUnavailable: see `peak_tracker`.
    """
    modules = [holder for holder in holders if isinstance(holder, nn.Module)]
    tracker = peak_tracker(device, *modules)
    try:
        tracker.reset_peak(*holders)
        tracker.resume()
        yield tracker
    finally:
        tracker.stop()


def find_compiled(module: nn.Module) -> str | None:
    """Name the first compiled part of `module`, as far as it can be seen from outside."""
    for name, part in module.named_modules():
        own = list(vars(part).values())
        of_classes = [value for kind in _own_classes(part) for value in vars(kind).values()]
        if isinstance(part, OptimizedModule) or any(map(is_compiled, own + of_classes)):
            return f"{name or 'the model'} ({type(part).__name__})"
    return None


def _own_classes(module: nn.Module) -> list[type]:
    """The classes of `module` that are not torch's own."""
    return [kind for kind in type(module).__mro__ if kind.__module__.split(".")[0] != "torch"]
