"""Where what blocks save for backward waits for it."""

import torch
from torch import nn

from lightning_ckpt.core.offload.config import OffloadConfig, read_offload
from lightning_ckpt.core.offload.disk import DiskTarget
from lightning_ckpt.core.offload.engine import Offloader, put_in_force, saving
from lightning_ckpt.core.offload.first_step import watch_first_step
from lightning_ckpt.core.offload.host import HostTarget, PinnedPool
from lightning_ckpt.core.offload.kept import kept_forward
from lightning_ckpt.core.offload.machine import check_directory, host_budget
from lightning_ckpt.core.offload.report import OffloadReport

__all__ = [
    "OffloadConfig",
    "OffloadReport",
    "Offloader",
    "kept_forward",
    "make_offloader",
    "nothing_to_move",
    "put_in_force",
    "read_offload",
    "saving",
    "watch_first_step",
]


def nothing_to_move(config: OffloadConfig) -> bool:
    """Whether every tensor is where it would be moved to, because there is no device."""
    return config.target == "host" and not torch.accelerator.is_available()


def make_offloader(config: OffloadConfig, root: nn.Module) -> Offloader | None:
    """An offload for the blocks of `root`; None if there is nothing to move.

    Raises:
        ValueError: the machine cannot do what `config` says.
    """
    budget = host_budget(config.max_host_bytes)
    if config.target == "disk":
        return Offloader(config, DiskTarget(check_directory(config.directory)), root)
    return (
        None if nothing_to_move(config) else Offloader(config, HostTarget(PinnedPool(budget)), root)
    )
