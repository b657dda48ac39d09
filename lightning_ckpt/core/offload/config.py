"""The user's word for offload as plain data."""

from dataclasses import dataclass
from typing import Literal

Target = Literal["host"]


@dataclass(frozen=True)
class OffloadConfig:
    """Where saved inputs wait for backward.

    Attributes:
        target: "host", in pinned memory of the host.
    """

    target: Target = "host"


def read_offload(offload: bool | str | OffloadConfig) -> OffloadConfig | None:
    """The config that `offload` stands for; None: tensors stay on the device.

    Raises:
        TypeError: it is neither a bool nor a word.
        ValueError: the word is not known.
    """
    if isinstance(offload, OffloadConfig):
        return offload
    if isinstance(offload, bool):
        return OffloadConfig() if offload else None
    if not isinstance(offload, str):
        raise TypeError(f"offload must be True, False or 'host', got {offload!r}")
    if offload != "host":
        raise ValueError(
            f"offload={offload!r} is not known; use True or 'host' (pinned memory of the host), "
            "or False (stay on the device)"
        )
    return OffloadConfig()
