"""Where what blocks save for backward waits for it."""

import torch
from torch import nn

from lightning_ckpt.core.offload.config import OffloadConfig, read_offload
from lightning_ckpt.core.offload.disk import DiskTarget
from lightning_ckpt.core.offload.engine import Offloader, put_in_force, saving
from lightning_ckpt.core.offload.first_step import watch_first_step
from lightning_ckpt.core.offload.host import HostTarget
from lightning_ckpt.core.offload.kept import followed_forward, kept_forward
from lightning_ckpt.core.offload.machine import check_directory, host_budget
from lightning_ckpt.core.offload.pool import PinnedPool
from lightning_ckpt.core.offload.report import OffloadReport
from lightning_ckpt.core.offload.staged import StagedTarget
from lightning_ckpt.core.offload.targets import Target

__all__ = [
    "OffloadConfig",
    "OffloadReport",
    "Offloader",
    "followed_forward",
    "kept_forward",
    "make_offloader",
    "make_target",
    "nothing_to_move",
    "put_in_force",
    "read_offload",
    "saving",
    "watch_first_step",
]


_STAGE_BYTES = 2 * 2**30  # pinned between device and disk at most, if the user says nothing


def nothing_to_move(config: OffloadConfig) -> bool:
    """Whether every tensor is where it would be moved to, because there is no device."""
    return config.target == "host" and not torch.accelerator.is_available()


def make_offloader(
    config: OffloadConfig, root: nn.Module, is_steady: bool = False
) -> Offloader | None:
    """An offload for the blocks of `root`; None if there is nothing to move. A steady one lets
    bytes go, and brings them back, at times that can be foretold.

    Raises:
        ValueError: the machine cannot do what `config` says.
    """
    target = make_target(config)
    return None if target is None else Offloader(config, target, root, is_steady)


def make_target(config: OffloadConfig) -> Target | None:
    """Where tensors wait; None if there is nothing to move.

    Raises:
        ValueError: the machine cannot do what `config` says.
    """
    budget = host_budget(config.max_host_bytes)
    if nothing_to_move(config):
        return None
    if config.target == "host":
        return HostTarget(PinnedPool(budget))
    disk = DiskTarget(check_directory(config.directory))
    if not torch.accelerator.is_available():
        return disk
    if config.max_host_bytes is None:
        budget = min(budget, _STAGE_BYTES)
    return StagedTarget(disk, PinnedPool(budget))
