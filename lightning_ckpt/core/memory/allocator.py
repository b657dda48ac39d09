"""The peak that the allocator of an accelerator keeps."""

from typing import Any, Protocol

import torch

from lightning_ckpt.core.memory.peak import PeakTracker, PeakUnavailable


class Counters(Protocol):
    """Bytes in use now and at most, of a device or of anything that counts alike."""

    def memory_allocated(self, device: Any, /) -> int: ...

    def max_memory_allocated(self, device: Any, /) -> int: ...

    def reset_peak_memory_stats(self, device: Any, /) -> None: ...


class AllocatorPeak(PeakTracker):
    """The peak that the allocator of an accelerator keeps, which everyone in the process shares.

    It is reset by `reset_peak`, and by `resume` when the pause had a higher peak than all before:
    others who read it see no more resets than that. Their resets cost nothing here, as long as they
    lie in a pause; one that does not hides what came since `peak_bytes` was last read.

    Args:
        device: the accelerator.
        counters: what to read, by default what torch has for `device`.

    Attributes:
        was_disturbed: somebody reset it outside of a pause, as far as that can be seen: the counter
            had fallen when it was read.

    Raises:
        PeakUnavailable: there is nothing that keeps a peak for `device`.
    """

    def __init__(self, device: torch.device, counters: Counters | None = None) -> None:
        self._device = device
        self._counters = _device_counters(device) if counters is None else counters
        self._peak = 0
        self._paused = True
        self._last_read = 0
        self.was_disturbed = False

    def resume(self, *holders: Any) -> None:
        if self._paused:
            if self._counters.max_memory_allocated(self._device) > self._peak:
                self._counters.reset_peak_memory_stats(self._device)
            self._last_read = 0
        self._paused = False

    def pause(self) -> None:
        self._peak = self.peak_bytes
        self._paused = True

    def reset_peak(self, *holders: Any) -> None:
        self._counters.reset_peak_memory_stats(self._device)
        self._peak = self.current_bytes
        self._last_read = 0
        self.was_disturbed = False

    def backdate(self) -> None:
        pass  # the allocator gave those, too, and has them in its peak

    @property
    def met_bytes(self) -> int:
        return 0

    def stop(self) -> None:
        self.pause()

    @property
    def peak_bytes(self) -> int:
        if self._paused:
            return self._peak
        read = self._counters.max_memory_allocated(self._device)
        if read < self._last_read:
            self.was_disturbed = True
        self._last_read = read
        return max(self._peak, read)

    @property
    def current_bytes(self) -> int:
        return self._counters.memory_allocated(self._device)

    @property
    def reserved_bytes(self) -> int | None:
        """The most that the allocator held from the device at once, None where it does not say."""
        read = getattr(self._counters, "max_memory_reserved", None)
        return None if read is None else read(self._device)


def _device_counters(device: torch.device) -> Counters:
    if device.type == "mps":  # it counts what is allocated now and what the driver holds, no peak
        raise PeakUnavailable("torch keeps no peak of allocated memory on MPS")
    accelerator = torch.accelerator.current_accelerator()
    current = accelerator is not None and accelerator.type == device.type
    # `torch.accelerator` has these since torch 2.9; before, each device's module has them.
    if current and hasattr(torch.accelerator, "max_memory_allocated"):
        return torch.accelerator
    try:
        counters: Any = torch.get_device_module(device)
    except RuntimeError as error:
        raise PeakUnavailable(f"torch has no module for the device {device}") from error
    if not hasattr(counters, "max_memory_allocated"):
        raise PeakUnavailable(f"torch keeps no peak of allocated memory on {device}")
    return counters
