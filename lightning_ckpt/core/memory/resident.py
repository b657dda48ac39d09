"""The resident set of this process: what it holds of the host's memory, tensors or not."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from lightning_ckpt.core.memory.allocator import AllocatorPeak
from lightning_ckpt.core.memory.peak import PeakUnavailable

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_CLEAR_PEAK = "5"  # what Linux takes for: the peak starts again (proc_pid_clear_refs(5))


class ResidentSet(AllocatorPeak):
    """The peak of the resident set, which everyone in the process shares.

    Linux keeps a peak and lets the process reset it. Elsewhere, or where that is not allowed, it is
    looked at in `look` and whenever `peak_bytes` is read, by psutil: a peak in between is missed.

    Raises:
        PeakUnavailable: neither Linux nor psutil is there.
    """

    def __init__(self) -> None:
        self._is_sampled = not _can_reset()
        counters = _Samples() if self._is_sampled else _Kernel()
        super().__init__(torch.device("cpu"), counters)

    def look(self) -> None:
        """Ask now, where nothing else keeps the peak."""
        if self._is_sampled:
            _ = self.peak_bytes


class _Kernel:
    """Linux: `VmRSS` and `VmHWM`."""

    def memory_allocated(self, device: Any, /) -> int:
        return _status_bytes("VmRSS:")

    def max_memory_allocated(self, device: Any, /) -> int:
        return _status_bytes("VmHWM:")

    def reset_peak_memory_stats(self, device: Any, /) -> None:
        _CLEAR.write_text(_CLEAR_PEAK)


class _Samples:
    """psutil, and the highest of what it said when it was asked."""

    def __init__(self) -> None:
        try:
            self._process = import_module("psutil").Process(os.getpid())
        except ImportError as error:
            raise PeakUnavailable(
                f"the resident set cannot be read on {sys.platform} without psutil; "
                "`pip install psutil`"
            ) from error
        self._peak = 0

    def memory_allocated(self, device: Any, /) -> int:
        return int(self._process.memory_info().rss)

    def max_memory_allocated(self, device: Any, /) -> int:
        self._peak = max(self._peak, self.memory_allocated(device))
        return self._peak

    def reset_peak_memory_stats(self, device: Any, /) -> None:
        self._peak = self.memory_allocated(device)


def _can_reset() -> bool:
    try:
        _CLEAR.write_text(_CLEAR_PEAK)
    except OSError:  # no Linux, or a container that may not
        return False
    return _STATUS.exists()


def _status_bytes(key: str) -> int:
    for line in _STATUS.read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise PeakUnavailable(f"{_STATUS} has no {key}")
