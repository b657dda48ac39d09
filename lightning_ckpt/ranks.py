"""What the ranks of a run tell each other."""

import zlib
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import lightning.pytorch as pl
import torch
import torch.distributed as dist

T = TypeVar("T")

FAILED = "failed: "  # begins the report of a rank that has no plan


def gathered(trainer: "pl.Trainer", value: T) -> list[T]:
    """The values of all ranks of the run, in their order. Every rank must call it."""
    return [value] if is_alone(trainer) else _gather(value)


def from_all_ranks(trainer: "pl.Trainer", report: list[str]) -> list[list[str]]:
    """Each rank's report, or only this one's where all are alike. Every rank must call it."""
    if is_alone(trainer):
        return [report]
    # All reports would be many bytes with many ranks; they are needed only where they differ.
    if len(set(_gather(zlib.crc32("\n".join(report).encode())))) == 1:
        return [report]
    return _gather(report)


def first_difference(reports: list[list[str]]) -> str | None:
    """What to say of ranks that failed, or whose reports are not that of rank 0."""
    for rank, report in enumerate(reports):
        if report[0].startswith(FAILED):
            return f"rank {rank} could not make its plan: {report[0].removeprefix(FAILED)}"
    for rank, report in enumerate(reports):
        for first, here in zip_longest(reports[0], report, fillvalue="nothing more"):
            if here != first:
                return (
                    f"the ranks have different plans or models: rank 0 has {first}, rank {rank} "
                    f"has {here}; build the same model and pass the same arguments on every rank"
                )
    return None


def largest_of_ranks(trainer: "pl.Trainer", numbers: Sequence[int]) -> list[int]:
    """The largest of each number over all ranks. Every rank must call it, with as many. Where the
    ranks can talk by way of the host they do; else the host waits for the device."""
    if is_alone(trainer):
        return list(numbers)
    by_host = "cpu:" in dist.get_backend_config()
    device = torch.device("cpu") if by_host else trainer.strategy.root_device
    found = torch.tensor(numbers, dtype=torch.int64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    largest: list[int] = found.tolist()
    return largest


def is_alone(trainer: "pl.Trainer") -> bool:
    """Whether there is no other rank to ask."""
    # Not the process group's size: one rank of a group may train alone, on a single device.
    return trainer.world_size == 1 or not (dist.is_available() and dist.is_initialized())


def _gather(value: T) -> list[T]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
