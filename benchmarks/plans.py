"""Peak memory and step time of each plan, on a CPU or on a CUDA device, as a Markdown table.

    python benchmarks/plans.py                       # the shape of the README's table
    python benchmarks/plans.py --device cuda --width 2048 --batch 4 --length 4096 --dtype bfloat16

Steps of all plans are taken in turn in one process; times are ratios of medians to plain training.
On a Linux CPU set OMP_NUM_THREADS=1 and the malloc variables named in `overhead.py`, or page faults
make plain training look slow. Peak is that of live tensor bytes on a CPU (parameters counted in, no
optimizer), of the allocator on a device.
"""

import platform
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from overhead import VOCABULARY, Model, parser_of, wait_for
from torch import Tensor, nn

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core.memory import track_peak

MIB = 2**20


def plans(model: nn.Module, with_offload: bool) -> dict[str, Any]:
    """What makes the context for each row."""
    rows: dict[str, Any] = {"plain": nullcontext}
    for every_n in (4, 2, 1):
        rows[f"every_n={every_n}"] = lambda n=every_n: apply_partial_checkpoint(model, every_n=n)
    if with_offload:
        rows["every_n=1, offload"] = lambda: apply_partial_checkpoint(model, offload=True)
    return rows


def step(model: nn.Module, tokens: Tensor) -> None:
    model.zero_grad()
    model(tokens).backward()


def peak(model: nn.Module, tokens: Tensor, plan: AbstractContextManager[Any]) -> int:
    model.zero_grad()
    with plan, track_peak(model, tokens, device=tokens.device) as tracker:
        model(tokens).backward()
    return tracker.peak_bytes


def seconds(model: nn.Module, tokens: Tensor, plan: AbstractContextManager[Any]) -> float:
    with plan:
        wait_for(tokens.device)
        start = time.perf_counter()
        step(model, tokens)
        wait_for(tokens.device)
        return time.perf_counter() - start


def machine(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s)"


def main() -> None:
    parser = parser_of(__doc__, rounds=7)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = Model(options.blocks, by_hand=False, width=options.width)
    model.to(device, getattr(torch, options.dtype))
    tokens = torch.randint(VOCABULARY, (options.batch, options.length), device=device)

    rows = plans(model, with_offload=device.type != "cpu")
    step(model, tokens)  # allocator and kernels warm
    peaks = {name: peak(model, tokens, plan()) for name, plan in rows.items()}
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(options.rounds):
        for name, plan in rows.items():
            times[name].append(seconds(model, tokens, plan()))
    plain = statistics.median(times["plain"])

    print(
        f"{machine(device)}, torch {torch.__version__}; {options.blocks} blocks of width "
        f"{options.width}, {options.batch} x {options.length} tokens, {options.dtype}\n"
    )
    print("| plan | peak MiB | step |\n| --- | --- | --- |")
    for name in rows:
        print(
            f"| {name} | {peaks[name] / MIB:.1f} | {statistics.median(times[name]) / plain:.2f} |"
        )


if __name__ == "__main__":
    main()
