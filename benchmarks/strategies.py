"""Plain, hand-written and our checkpointing under DDP and FSDP2, on two processes of this machine.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 \
    MALLOC_TOP_PAD_=268435456 MALLOC_ARENA_MAX=1 python benchmarks/strategies.py

The model is that of `overhead.py` with 4 blocks, every block checkpointed. Six models are wrapped
as the strategies do it (our plan is in force before the wrap of DDP, after that of FSDP2) and their
steps are taken in turn, forward, backward and AdamW. Hand-written is `torch.utils.checkpoint` in
the model's forward under DDP, and `checkpoint_wrapper` around each block, with its FSDP unit around
that, under FSDP2. Prints, of rank 0, the median and the quartiles of the step times, the ratio to
hand-written (median of the rounds' ratios), and the peak of live bytes in a step of its own. A
step's noise is larger than the bar of 1 %, so the bookkeeping of ours is measured too, in narrow
models with two tokens, where little else is left, and given as a share of the step.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from overhead import VOCABULARY, WIDTH, Model
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core.memory import track_peak

KINDS = ("plain", "by hand", "ours")


def under_ddp(kind: str, num_blocks: int, width: int) -> nn.Module:
    model = Model(num_blocks, kind == "by hand", width)
    if kind == "ours":
        apply_partial_checkpoint(model)
    return DistributedDataParallel(model)


def under_fsdp2(kind: str, num_blocks: int, width: int) -> nn.Module:
    model = Model(num_blocks, False, width)
    if kind == "by hand":
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if kind == "ours":  # as the strategy does it, after `configure_model`
        apply_partial_checkpoint(model)
    return model


ENGINES: dict[str, Callable[[str, int, int], nn.Module]] = {"DDP": under_ddp, "FSDP2": under_fsdp2}


def stepper(model: nn.Module, tokens: torch.Tensor) -> tuple[Callable[[], float], list]:
    """A function that takes one step and gives its seconds, and what is alive beside the model."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> float:
        dist.barrier()
        start = time.perf_counter()
        model(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - start

    return step, [model, optimizer, tokens]


def in_turn(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """Each round begins with another step, since what ran before leaves its mark on the caches."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(rounds + 2):
        start = index % len(names)
        for name in names[start:] + names[:start]:
            seconds = steps[name]()
            if index > 1:  # two rounds warm up
                times[name].append(seconds)
    return times


def build_all(
    num_blocks: int, width: int, tokens: torch.Tensor
) -> tuple[dict[str, Callable[[], float]], dict[str, list]]:
    steps, alive = {}, {}
    for engine, build in ENGINES.items():
        for kind in KINDS:
            torch.manual_seed(0)
            name = f"{engine}, {kind}"
            steps[name], alive[name] = stepper(build(kind, num_blocks, width), tokens)
    return steps, alive


def work(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    torch.manual_seed(rank)
    tokens = torch.randint(VOCABULARY, (options.batch, options.length))
    narrow, _ = build_all(options.blocks, 32, tokens[:1, :2])
    tiny_times = in_turn(narrow, 200)
    steps, alive = build_all(options.blocks, WIDTH, tokens)
    times = in_turn(steps, options.rounds)
    peaks = {}
    for name, step in steps.items():
        with track_peak(*alive[name]) as tracker:
            step()
        peaks[name] = tracker.peak_bytes
    if rank == 0:
        show(times, peaks)
        show_bookkeeping(times, tiny_times, options.blocks)
    dist.destroy_process_group()


def show(times: dict[str, list[float]], peaks: dict[str, int]) -> None:
    for name, values in times.items():
        by_hand = times[f"{name.split(',')[0]}, by hand"]
        ratios = [mine / other for mine, other in zip(values, by_hand, strict=True)]
        low, middle, high = statistics.quantiles(values, n=4)
        print(
            f"{name:15} {middle * 1e3:8.1f} ms/step ({low * 1e3:.1f} to {high * 1e3:.1f})"
            f"   {statistics.median(ratios):6.4f} of by hand   peak {peaks[name]:12,d} B"
        )


def show_bookkeeping(
    times: dict[str, list[float]], tiny_times: dict[str, list[float]], num_blocks: int
) -> None:
    for engine in ENGINES:
        pairs = zip(tiny_times[f"{engine}, ours"], tiny_times[f"{engine}, by hand"], strict=True)
        extra = statistics.median(mine - other for mine, other in pairs)
        share = extra / statistics.median(times[f"{engine}, by hand"])
        each = extra * 1e6 / num_blocks
        print(f"{engine:15} bookkeeping {each:.0f} us per block and step, {share:.2%} of the step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(work, (str(Path(folder)), options), nprocs=2)


if __name__ == "__main__":
    main()
