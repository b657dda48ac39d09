"""The arguments of `PeakMemoryMonitor`, checked."""

from dataclasses import dataclass
from importlib.util import find_spec

from lightning_ckpt.core.plan import check_switch


@dataclass(frozen=True)
class MonitorSettings:
    """See `PeakMemoryMonitor`.

    Raises:
        TypeError, ValueError: an argument is impossible.
        ModuleNotFoundError: `plot=True` without matplotlib.
    """

    breakdown: bool = True
    plot: bool = False
    every_n_epochs: int = 1
    first_steps: int | None = 16
    snapshot: bool | str = False
    table: bool = True

    def __post_init__(self) -> None:
        _check_at_least_one("every_n_epochs", self.every_n_epochs, "1 measures every epoch")
        if self.first_steps is not None:
            _check_at_least_one("first_steps", self.first_steps, "None follows every step")
        check_switch("breakdown", self.breakdown)
        check_switch("plot", self.plot, "True saves memory.png in the trainer's log_dir")
        check_switch("table", self.table)
        _check_snapshot(self.snapshot)
        if self.plot and find_spec("matplotlib") is None:
            raise ModuleNotFoundError(
                "plot=True needs matplotlib: pip install 'lightning-ckpt[plot]', or leave "
                "plot=False"
            )


def _check_at_least_one(name: str, value: int, hint: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int of at least 1, got {value!r}; {hint}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}; {hint}")


def _check_snapshot(snapshot: bool | str) -> None:
    if not isinstance(snapshot, (bool, str)):
        raise TypeError(f"snapshot must be True, False or 'oom', got {snapshot!r}")
    if isinstance(snapshot, str) and snapshot != "oom":
        raise ValueError(
            f"snapshot={snapshot!r} is not known; use True (of one step), 'oom' (when memory runs "
            "out) or False"
        )
