"""What the ranks of a run tell each other."""

import zlib
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch.distributed as dist

T = TypeVar("T")


def gathered(trainer: "pl.Trainer", value: T) -> list[T]:
    """The values of all ranks of the run, in their order. Every rank must call it."""
    return [value] if _is_alone(trainer) else _gather(value)


def from_all_ranks(trainer: "pl.Trainer", report: list[str]) -> list[list[str]]:
    """Each rank's report, or only this one's where all are alike. Every rank must call it."""
    if _is_alone(trainer):
        return [report]
    # All reports would be many bytes with many ranks; they are needed only where they differ.
    if len(set(_gather(zlib.crc32("\n".join(report).encode())))) == 1:
        return [report]
    return _gather(report)


def _is_alone(trainer: "pl.Trainer") -> bool:
    # Not the process group's size: one rank of a group may train alone, on a single device.
    return trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized())


def _gather(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
