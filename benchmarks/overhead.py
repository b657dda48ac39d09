"""Cost of ours over hand-written `torch.utils.checkpoint` in the same model.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 \
    MALLOC_TOP_PAD_=268435456 MALLOC_ARENA_MAX=1 python benchmarks/overhead.py

Both train the same plain-torch Llama-like shape (12 blocks, width 256, batch 8 x 256), every block
checkpointed, steps taken in turn in one process. Prints the ratio of the median step times, and,
since a step's noise is larger than the bar, our own time per block call (its forward and its
recompute are exchanged for nothing) as a share of the step.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from lightning_ckpt import apply_partial_checkpoint

VOCABULARY, WIDTH, HEADS = 512, 256, 8

T = TypeVar("T")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        hidden = round(2.7 * width)
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (B, T, D)
        batch, length, _ = x.shape
        qkv = self.qkv(self.norms[0](x)).view(batch, length, 3, HEADS, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each (B, H, T, D / H)
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        gate, up = self.gate_up(self.norms[1](x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self, num_blocks: int, by_hand: bool, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.by_hand = by_hand

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T)
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.by_hand else block(x)
        return cross_entropy(self.head(x[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def step_time(model: nn.Module, tokens: Tensor) -> float:
    model.zero_grad()
    start = time.perf_counter()
    model(tokens).backward()
    return time.perf_counter() - start


def interleaved(steps: dict[str, Callable[[], T]], rounds: int) -> dict[str, list[T]]:
    """What the steps return, each of them once in every round."""
    times: dict[str, list[T]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        for name in random.sample(list(steps), len(steps)):  # or one always follows the other
            seconds = steps[name]()
            if index:  # the first round warms up
                times[name].append(seconds)
    return times


def parser_of(description: str | None, rounds: int) -> argparse.ArgumentParser:
    """The words that say which model, on how much data."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=WIDTH)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--length", type=int, default=256)
    return parser


def wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def main() -> None:
    parser = parser_of(__doc__, rounds=15)
    options = parser.parse_args()
    torch.manual_seed(0)
    # One for both, so that memory lies the same.
    model = Model(options.blocks, by_hand=False, width=options.width)
    tokens = torch.randint(VOCABULARY, (options.batch, options.length))

    def by_hand(tokens: Tensor) -> float:
        model.by_hand = True
        return step_time(model, tokens)

    def ours(tokens: Tensor) -> float:
        model.by_hand = False
        with apply_partial_checkpoint(model):
            return step_time(model, tokens)

    def both(tokens: Tensor) -> dict[str, Callable[[], float]]:
        return {"by hand": lambda: by_hand(tokens), "ours": lambda: ours(tokens)}

    times = interleaved(both(tokens), options.rounds)
    # With two tokens next to nothing is left but the bookkeeping, which does not grow with size.
    tiny_times = interleaved(both(tokens[:1, :2]), 200)
    paired = [ours / hand for hand, ours in zip(times["by hand"], times["ours"], strict=True)]
    medians = {name: statistics.median(values) for name, values in times.items()}
    tiny_medians = {name: statistics.median(values) for name, values in tiny_times.items()}
    extra = tiny_medians["ours"] - tiny_medians["by hand"]
    for name, seconds in medians.items():
        print(f"{name:8} {seconds:8.4f} s/step")
    print(f"ratio of medians          {medians['ours'] / medians['by hand']:.4f}")
    print(f"median of paired ratios   {statistics.median(paired):.4f}")
    print(f"bookkeeping of ours       {extra * 1e6 / options.blocks:.0f} us per block and step")
    print(f"as a share of the step    {extra / medians['by hand']:.2%}")


if __name__ == "__main__":
    main()
