"""Torch's own record of a CUDA device's memory, for the viewer at https://pytorch.org/memory_viz."""

from pathlib import Path

from lightning_ckpt.core._torch import (
    record_memory_history,
    save_memory_snapshot,
    stop_memory_history,
)


class CudaHistory:
    """Every allocation and release with its stack, the newest `_MAX_EVENTS` of them.

    Args:
        is_on: record from now on.
    """

    _MAX_EVENTS = 100_000  # some steps of a large model; a file of some tens of MiB

    def __init__(self, is_on: bool = False) -> None:
        self._is_on = False
        if is_on:
            self.start()

    def start(self) -> None:
        """Record from here on."""
        record_memory_history(self._MAX_EVENTS)
        self._is_on = True

    def save(self, path: Path) -> None:
        """Write what was recorded so far.

        Raises:
            OSError: the file cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        save_memory_snapshot(str(path))

    def pause(self) -> None:
        """Record no more for now. What somebody else records ends with it: torch has one record."""
        if self._is_on:
            self._is_on = False
            stop_memory_history()

    def stop(self) -> None:
        """Record no more."""
        self.pause()
