"""Plans that follow the lengths of batches, against the one plan that fits the longest.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 \
    MALLOC_TOP_PAD_=268435456 MALLOC_ARENA_MAX=1 python benchmarks/lengths.py

The sources of Python's standard library, as bytes, are cut into texts of lognormal length (median
an eighth of the longest, sigma 0.5), eight to a batch: texts of like length together, and at random
with padding. The Llama-like model of `overhead.py` takes each batch under the plan for its length,
and under the plan for the longest, in turn, in one process, with the same budget: what every block
recomputed needs for the longest batch, and `--room` of the way from there to what plain training
needs. Printed are tokens per second (padding counts as none), by the clock and by CPU time, as the
median over rounds of the ratio; how many blocks were recomputed; and the peaks.

`--counted` measures and plans on tensors without values, and counts what is multiplied: no clock,
no noise, any size.
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from sysconfig import get_paths

import torch
from overhead import VOCABULARY, WIDTH, Model
from torch import Tensor, nn

from lightning_ckpt import Plan, apply_partial_checkpoint
from lightning_ckpt.core._torch import FakeTensorMode, is_fake
from lightning_ckpt.core.budget.by_size import PlansBySize
from lightning_ckpt.core.budget.clock import Clock, CostClock
from lightning_ckpt.core.budget.costs import Measurement, predict
from lightning_ckpt.core.budget.sizes import size_of
from lightning_ckpt.core.estimate import measure_step
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.memory import peak_tracker, track_peak
from lightning_ckpt.core.memory.live_bytes import LiveBytes

MIB, ROWS = 2**20, 8
Batch = dict[str, Tensor]


def texts(num: int, longest: int, seed: int = 0) -> list[bytes]:
    """Neighbouring stretches of real text; the first is of the longest length."""
    rng = random.Random(seed)
    drawn = (round(rng.lognormvariate(0, 0.5) * longest / 8) for _ in range(num - 1))
    lengths = [longest, *(min(longest, max(8, length)) for length in drawn)]
    source = bytearray()
    for path in sorted(Path(get_paths()["stdlib"]).glob("*.py")):
        source += path.read_bytes()
        if len(source) > sum(lengths):
            break
    ends = [0]
    for length in lengths:
        ends.append(ends[-1] + length)
    return [bytes(source[a:b]) for a, b in pairwise(ends)]


def batches_of(samples: Sequence[bytes], grouped: bool, seed: int = 1) -> list[tuple[Batch, int]]:
    """Padded batches in random order, and how many tokens each holds."""
    rng = random.Random(seed)
    order = sorted(samples, key=len) if grouped else rng.sample(samples, len(samples))
    groups = [order[i : i + ROWS] for i in range(0, len(order), ROWS)]
    rng.shuffle(groups)
    made = []
    for group in groups:
        longest = max(map(len, group))
        tokens = torch.zeros(len(group), longest, dtype=torch.long)
        for row, sample in zip(tokens, group, strict=True):
            row[: len(sample)] = torch.tensor(list(sample))  # bytes
        made.append(({"tokens": tokens}, sum(map(len, group))))
    return made


def step(model: nn.Module, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


def measured(model: Model, batch: Batch, optimizer: torch.optim.Optimizer) -> Measurement:
    tracker, clock = peak_tracker("cpu", model), Clock("cpu")
    if is_fake(batch["tokens"]):
        tracker, clock = LiveBytes("meta"), CostClock("cpu", 30e9, 10e9)
    return measure_step(model, batch, step, [optimizer], tracker=tracker, clock=clock)


def train(model: Model, optimizer: torch.optim.Optimizer, batch: Batch) -> None:
    loss = step(model, batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


Choose = Callable[[Batch], Plan]


class Tally:
    """What one way of choosing plans took in a round."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self.recomputed = 0

    def take(
        self,
        handle: Handle,
        choose: Choose,
        model: Model,
        optimizer: torch.optim.Optimizer,
        batch: Batch,
    ) -> None:
        wall, cpu = time.perf_counter(), time.process_time()
        handle.change(choose(batch))
        train(model, optimizer, batch)
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu
        self.recomputed += handle.plan.num_recomputed


def compare(name: str, grouped: bool, options: argparse.Namespace) -> None:
    torch.manual_seed(0)
    model = Model(12, by_hand=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    made = batches_of(texts(options.batches * ROWS, options.longest), grouped)
    longest = max((batch for batch, _ in made), key=lambda batch: batch["tokens"].numel())
    train(model, optimizer, longest)
    largest = measured(model, longest, optimizer)
    low, high = (predict(largest, [action] * 12).peak for action in ("recompute", "keep"))
    plans = PlansBySize(int(low + options.room * (high - low)))
    plans.add([(size_of(longest), largest)], is_settled=True)
    fixed = plans.choose(size_of(longest))
    assert fixed is not None
    num_measured = 1
    for batch, _ in made:
        if plans.choose(size_of(batch)) is None:
            plans.add([(size_of(batch), measured(model, batch, optimizer))], is_settled=True)
            num_measured += 1

    def own(batch: Batch) -> Plan:
        plan = plans.choose(size_of(batch))
        assert plan is not None
        return plan

    ways: dict[str, Choose] = {"one plan": lambda batch: fixed, "by length": own}
    if options.counted:
        print(count(name, ways, made), f"{num_measured} of {len(made)} |", flush=True)
        return
    ratios: dict[str, list[float]] = {"wall": [], "cpu": []}
    with apply_partial_checkpoint(model) as handle:
        peaks = {
            way: peak_of(handle, choose, model, optimizer, made) for way, choose in ways.items()
        }
        for number in range(options.rounds):
            tallies = {way: Tally() for way in ways}
            for index, (batch, _) in enumerate(made):
                order = list(ways) if (index + number) % 2 else list(reversed(ways))
                for way in order:
                    tallies[way].take(handle, ways[way], model, optimizer, batch)
            one, by_length = tallies["one plan"], tallies["by length"]
            ratios["wall"].append(one.wall / by_length.wall)
            ratios["cpu"].append(one.cpu / by_length.cpu)
    num_tokens = sum(num for _, num in made)
    print(
        f"| {name} | {plans.budget / MIB:.1f} | {statistics.median(ratios['wall']):.3f} | "
        f"{statistics.median(ratios['cpu']):.3f} | {min(ratios['cpu']):.3f} to "
        f"{max(ratios['cpu']):.3f} | {one.recomputed} → {by_length.recomputed} | "
        f"{num_tokens / one.wall:.0f} → {num_tokens / by_length.wall:.0f} | {num_measured} of "
        f"{len(made)} | {peaks['one plan'] / MIB:.1f}, {peaks['by length'] / MIB:.1f} |",
        flush=True,
    )


def products(batch: Batch, plan: Plan) -> tuple[int, int]:
    """What is multiplied in a step: all of it, and what of that is computed again."""
    rows, length = batch["tokens"].shape
    hidden = round(2.7 * WIDTH)
    linear = rows * length * WIDTH * (4 * WIDTH + 3 * hidden)
    again = {
        "keep": 0,
        "recompute": linear + 2 * rows * length**2 * WIDTH,
        "recompute_saving": 0,
        "recompute_saving_attention": linear,
    }
    repeated = sum(again[block.action] for block in plan)
    head = rows * length * WIDTH * VOCABULARY
    return 3 * (len(plan) * again["recompute"] + head) + repeated, repeated


def count(name: str, ways: dict[str, Choose], made: Sequence[tuple[Batch, int]]) -> str:
    """A row of the table that goes by what is multiplied."""
    total, recomputed = dict.fromkeys(ways, 0), dict.fromkeys(ways, 0)
    for batch, _ in made:
        for way, choose in ways.items():
            plan = choose(batch)
            total[way] += products(batch, plan)[0]
            recomputed[way] += plan.num_recomputed
    most = sum(products(batch, ways["one plan"](batch))[0] for batch, _ in made)
    least = most - sum(products(batch, ways["one plan"](batch))[1] for batch, _ in made)
    return (
        f"| {name} | {total['one plan'] / total['by length']:.3f} | {most / least:.3f} | "
        f"{recomputed['one plan']} → {recomputed['by length']} |"
    )


def peak_of(
    handle: Handle,
    choose: Choose,
    model: Model,
    optimizer: torch.optim.Optimizer,
    made: Sequence[tuple[Batch, int]],
) -> int:
    """The highest peak of any step, in bytes."""
    peaks = []
    for batch, _ in made:
        handle.change(choose(batch))
        with track_peak(model, optimizer, batch) as tracker:
            train(model, optimizer, batch)
        peaks.append(tracker.peak_bytes)
    return max(peaks)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--batches", type=int, default=40)
    parser.add_argument("--longest", type=int, default=256)
    parser.add_argument("--only", choices=["alike", "random"], help="one of the two rows")
    parser.add_argument("--counted", action="store_true", help="count products, and time nothing")
    parser.add_argument("--room", type=float, default=0.05)
    options = parser.parse_args()
    rows = {"alike": ("of like length", True), "random": ("at random, padded", False)}
    chosen = [rows[options.only]] if options.only else list(rows.values())
    if options.counted:
        print("| batches | products, one plan over by length | at most | ", end="")
        print("blocks recomputed | measured |")
        print("| --- | --- | --- | --- | --- |")
    else:
        print("| batches | budget MiB | tokens/s, wall | CPU time | CPU, all rounds | ", end="")
        print("blocks recomputed | tokens/s | measured | peak MiB |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    with FakeTensorMode() if options.counted else nullcontext():
        for name, is_grouped in chosen:
            compare(name, is_grouped, options)


if __name__ == "__main__":
    main()
