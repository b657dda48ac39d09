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
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from sysconfig import get_paths

import torch
from overhead import Model
from torch import Tensor

from lightning_ckpt import Plan, apply_partial_checkpoint
from lightning_ckpt.core.apply import Handle
from lightning_ckpt.core.by_size import PlansBySize
from lightning_ckpt.core.clock import Clock
from lightning_ckpt.core.costs import Measurement, predict
from lightning_ckpt.core.estimate import measure_step
from lightning_ckpt.core.memory import peak_tracker, track_peak
from lightning_ckpt.core.sizes import size_of

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
            row[: len(sample)] = torch.tensor(list(sample))
        made.append(({"tokens": tokens}, sum(map(len, group))))
    return made


def step(model: Model, batch: Batch) -> Tensor:
    loss: Tensor = model(**batch)
    return loss


def measured(model: Model, batch: Batch, optimizer: torch.optim.Optimizer) -> Measurement:
    tracker = peak_tracker("cpu", model)
    return measure_step(model, batch, step, [optimizer], tracker=tracker, clock=Clock("cpu"))


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
    parser.add_argument("--room", type=float, default=0.05)
    options = parser.parse_args()
    print("| batches | budget MiB | tokens/s, wall | CPU time | CPU, all rounds | blocks ", end="")
    print("recomputed | tokens/s | measured | peak MiB |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    compare("of like length", True, options)
    compare("at random, padded", False, options)


if __name__ == "__main__":
    main()
