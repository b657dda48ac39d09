"""An accelerator's allocator whose live bytes a test sets."""

from __future__ import annotations

from typing import Any


class Counters:
    """What `torch.accelerator` says of a device's memory, in bytes."""

    def __init__(self) -> None:
        self.live = self.peak = self.num_resets = 0

    def set(self, *lives: int) -> None:
        """Let these many bytes be live, one after the other."""
        for live in lives:
            self.live = live
            self.peak = max(self.peak, live)

    def memory_allocated(self, device: Any) -> int:
        return self.live

    def max_memory_allocated(self, device: Any) -> int:
        return self.peak

    def max_memory_reserved(self, device: Any) -> int:
        return 2 * self.peak

    def reset_peak_memory_stats(self, device: Any) -> None:
        self.peak = self.live
        self.num_resets += 1
