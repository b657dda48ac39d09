"""A budget that may offload to disk against the truth: peaks and moved bytes, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/budget_offload.py [--shapes T5 ResNet]

Ten model shapes with AdamW, five budgets each between the least that any plan needs with offload
and plain training's need: the predicted peak against the measured one, and the bytes that were
moved, as predicted and as counted. The models need transformers 5.
"""

import argparse

import torch
from budget import ACTIONS, MIB, step, take_step
from shapes import shapes
from torch.optim import AdamW

from lightning_ckpt import OffloadConfig
from lightning_ckpt.core.apply import apply_plan_quietly
from lightning_ckpt.core.budget import fastest, least_peak, plan_of
from lightning_ckpt.core.budget.clock import Clock
from lightning_ckpt.core.budget.costs import predict
from lightning_ckpt.core.budget.weighing import choices_with
from lightning_ckpt.core.estimate import measure_step
from lightning_ckpt.core.memory import peak_tracker, track_peak

OFFLOAD = OffloadConfig("disk", scope="all", min_bytes=0)
CHOICES = choices_with(OFFLOAD)


def row(name: str) -> str:
    torch.manual_seed(0)
    model, batch = shapes()[name]()
    model.train()
    step(model, batch).backward()  # buffers that the first call makes
    model.zero_grad()
    optimizer = AdamW(model.parameters())
    tracker, clock = peak_tracker("cpu", model), Clock("cpu")
    measured = measure_step(
        model, batch, step, [optimizer], tracker=tracker, clock=clock, offload=OFFLOAD
    )
    least = [predict(measured, least_peak(measured, a)).peak for a in (ACTIONS, CHOICES)]
    high = predict(measured, ["keep"] * len(measured.names)).peak
    ratios, over, moved, counted = [], 0, 0, 0
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        budget = int(least[1] + share * (high - least[1]))
        actions = fastest(measured, budget, CHOICES)
        with apply_plan_quietly(model, plan_of(measured, actions, "disk"), OFFLOAD) as handle:
            with track_peak(model, batch, optimizer) as peak:
                take_step(model, batch, optimizer)
            counted += handle.offloaded_bytes
        moved += sum(call.options[actions[call.block]].moved for call in measured.calls)
        ratios.append(predict(measured, actions).peak / peak.peak_bytes - 1)
        over += peak.peak_bytes > budget
    sizes = " | ".join(f"{size / MIB:.2f}" for size in (*least, high))
    return (
        f"| {name} | {sizes} | {min(ratios):+.2%} to {max(ratios):+.2%} | {over} of 5 | "
        f"{counted / MIB:.2f} | {moved / max(counted, 1):.3f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="*", choices=list(shapes()), default=list(shapes()))
    print(
        "| shape | least MiB: recomputed | with offload | plain MiB | predicted over measured | "
        "over budget | moved MiB | moved over counted |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for name in parser.parse_args().shapes:
        print(row(name), flush=True)


if __name__ == "__main__":
    main()
