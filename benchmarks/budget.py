"""A budget against the truth: predicted and measured peaks, and step times, on a CPU.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 \
    MALLOC_TOP_PAD_=268435456 MALLOC_ARENA_MAX=1 python benchmarks/budget.py

Tables, of which `--only NAME` gives one:

peaks     ten model shapes with AdamW: for five budgets between what every block recomputed and what
          plain training needs, the predicted peak against the measured one
fakes     the same shapes: what `estimate` says on fake tensors against the measured step
counted   the same shapes, many budgets: what is computed again, against the best `every_n`
exact     the same shapes, and 12 Llama-like blocks with three of the four actions: the plan for
          each of 20 budgets against every plan there is
fronts    a Llama: against the interval of Transformers and torch's own selective checkpoint, each
          point of theirs against our plan for a budget of their measured peak
hole      a Llama-like shape: step times in the hole between `every_n=1` and `every_n=2`, against
          `every_n=1`, the only interval that fits
planning  the time that planning takes

Steps whose times are compared are taken in turn, in one process. The models need transformers 5.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any, get_args

import torch
from fronts import flops_of, print_front
from overhead import VOCABULARY, Model, interleaved
from shapes import Batch, shapes
from torch import Tensor, nn
from torch.optim import AdamW

from lightning_ckpt import BlockPlan, OffloadConfig, Plan, apply_partial_checkpoint
from lightning_ckpt.core.budget import fastest, least_peak
from lightning_ckpt.core.budget.able import choices
from lightning_ckpt.core.budget.clock import Clock, CostClock
from lightning_ckpt.core.budget.costs import Call, Measurement, Option, Segment, predict
from lightning_ckpt.core.budget.weighing import choices_with
from lightning_ckpt.core.budget.words import BudgetTooSmall
from lightning_ckpt.core.estimate import estimate, measure_step
from lightning_ckpt.core.memory import peak_tracker, track_peak
from lightning_ckpt.core.plan import Action, Choice

MIB = 2**20
ACTIONS = get_args(Action)


def step(model: nn.Module, batch: Batch) -> Tensor:
    result: Any = model(**batch)
    return result if isinstance(result, Tensor) else result.loss


def measure(model: nn.Module, batch: Batch, optimizers: list[torch.optim.Optimizer]) -> Measurement:
    tracker = peak_tracker("cpu", model)
    return measure_step(model, batch, step, optimizers, tracker=tracker, clock=Clock("cpu"))


def plan_of(measured: Measurement, actions: list[Action]) -> Plan:
    named = zip(measured.names, measured.class_names, actions, strict=True)
    return Plan(tuple(BlockPlan(*block) for block in named))


def true_peak(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer, plan: Plan) -> int:
    """Of a step as Lightning takes it."""
    with apply_partial_checkpoint(model, plan=plan), track_peak(model, batch, optimizer) as tracker:
        take_step(model, batch, optimizer)
    return tracker.peak_bytes


def take_step(model: nn.Module, batch: Batch, optimizer: torch.optim.Optimizer) -> None:
    loss = step(model, batch)
    model.zero_grad()
    loss.backward()
    optimizer.step()


def measured_shapes() -> Iterator[tuple[str, nn.Module, Batch, AdamW, Measurement]]:
    for name, make in shapes().items():
        torch.manual_seed(0)
        model, batch = make()
        model.train()
        step(model, batch).backward()  # buffers that the first call makes
        model.zero_grad()
        optimizer = AdamW(model.parameters())
        yield name, model, batch, optimizer, measure(model, batch, [optimizer])


def peaks() -> None:
    print("| shape | blocks | least MiB | plain MiB | predicted over measured | over budget |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, model, batch, optimizer, measured in measured_shapes():
        low = predict(measured, least_peak(measured, ACTIONS)).peak
        high = predict(measured, ["keep"] * len(measured.names)).peak
        ratios, over = [], 0
        for share in (0.0, 0.25, 0.5, 0.75, 1.0):
            budget = int(low + share * (high - low))
            actions = fastest(measured, budget, ACTIONS)
            peak = true_peak(model, batch, optimizer, plan_of(measured, actions))
            ratios.append(predict(measured, actions).peak / peak - 1)
            over += peak > budget
        print(
            f"| {name} | {len(measured.names)} | {low / MIB:.2f} | {high / MIB:.2f} | "
            f"{min(ratios):+.2%} to {max(ratios):+.2%} | {over} of 5 |",
            flush=True,
        )


def fakes() -> None:
    """`estimate` on fake tensors against the measured step."""
    print("| shape | plain MiB | every_n=1 MiB | estimated over measured |")
    print("| --- | --- | --- | --- |")
    for name, make in shapes().items():
        torch.manual_seed(0)
        model, batch = make()
        model.train()
        optimizer = AdamW(model.parameters())
        for _ in range(2):  # the steady step: with states and the gradients before
            loss = step(model, batch)
            model.zero_grad()
            loss.backward()
            optimizer.step()
        found = estimate(model, batch, step=step, optimizers=lambda m: AdamW(m.parameters()))
        points = [found.every_n[0], found.every_n[-1]]
        measured = [true_peak(model, batch, optimizer, p.plan) for p in points if p.plan]
        ratios = [p.peak / peak - 1 for p, peak in zip(points, measured, strict=True)]
        plain, every = (f"{peak / MIB:.2f}" for peak in measured)
        off = f"{min(ratios):+.2%} to {max(ratios):+.2%}"
        print(f"| {name} | {plain} | {every} | {off} |", flush=True)


def counted() -> None:
    """What is computed again, against the best interval that fits, in FLOPs: as predicted, and as
    counted in real steps."""
    print("| shape | budgets | predicted, more than the interval | counted |")
    print("| --- | --- | --- | --- |")
    for name, make in shapes().items():
        torch.manual_seed(0)
        model, batch = make()
        model.train()
        tracker, clock = peak_tracker("cpu", model), CostClock("cpu", 1e12, 1e30)
        measured = measure_step(
            model, batch, step, [AdamW(model.parameters())], tracker=tracker, clock=clock
        )
        pairs = against_intervals(measured, num_budgets=24)
        flops = {
            plan: flops_of(model, batch, partial(apply_partial_checkpoint, model, plan=plan))
            for plan in {plan_of(measured, list(actions)) for pair in pairs for actions in pair}
        }
        took = [[predict(measured, actions).seconds for actions in pair] for pair in pairs]
        real = [[flops[plan_of(measured, list(actions))] for actions in pair] for pair in pairs]
        worst = [max(ours / best - 1 for ours, best in each) for each in (took, real)]
        print(f"| {name} | {len(pairs)} | {worst[0]:+.3%} | {worst[1]:+.3%} |", flush=True)


def against_intervals(
    measured: Measurement, num_budgets: int
) -> list[tuple[list[Action], list[Action]]]:
    """For budgets between the least and plain training, and that of each interval: our plan, and
    the best interval that fits."""
    intervals = every_n_actions(len(measured.names))
    peaks = [predict(measured, actions).peak for actions in intervals]
    low = predict(measured, least_peak(measured, ACTIONS)).peak
    pairs = []
    for budget in {*peaks, *range(low, max(peaks), (max(peaks) - low) // num_budgets)}:
        fits = [a for a, peak in zip(intervals, peaks, strict=True) if peak <= budget]
        if fits:
            best = min(fits, key=lambda actions: predict(measured, actions).seconds)
            pairs.append((fastest(measured, budget, ACTIONS), best))
    return pairs


def every_n_actions(num: int) -> list[list[Action]]:
    return [["keep" if i % n else "recompute" for i in range(num)] for n in range(1, num + 1)]


def exact(num_budgets: int = 20) -> None:
    """What is found against the fastest of all plans, which are gone through one by one."""
    print("| shape | blocks | plans | slower than the fastest of all | over budget |")
    print("| --- | --- | --- | --- | --- |")
    for name, measured, actions in exact_cases():
        plans = [predict(measured, each)[:2] for each in product(*choices(measured, actions))]
        low, num_blocks = min(peak for peak, _ in plans), len(measured.names)
        high = predict(measured, ["keep"] * num_blocks).peak
        worst, over = 0.0, 0
        for number in range(num_budgets):
            budget = low + (high - low) * number // num_budgets
            found = predict(measured, fastest(measured, budget, actions))
            best = min(seconds for peak, seconds in plans if peak <= budget)
            worst, over = max(worst, found.seconds / best - 1), over + (found.peak > budget)
        row = f"{name} | {num_blocks} | {len(plans)} | {worst:.3%} | {over} of {num_budgets}"
        print(f"| {row} |", flush=True)


def exact_cases() -> Iterator[tuple[str, Measurement, tuple[Action, ...]]]:
    for name, *_, measured in measured_shapes():
        yield name, measured, ACTIONS
    model = Model(12, by_hand=False)
    batch = {"tokens": torch.randint(VOCABULARY, (2, 64))}
    step(model, batch).backward()
    model.zero_grad()
    yield (
        "Llama-like",
        measure(model, batch, []),
        tuple(a for a in ACTIONS if a != "recompute_saving"),
    )


# --- the hole between n=1 and n=2


def hole(rounds: int) -> None:
    torch.manual_seed(0)
    model = Model(12, by_hand=False)
    batch = {"tokens": torch.randint(VOCABULARY, (8, 256))}
    for _ in range(2):
        step(model, batch).backward()
    model.zero_grad()
    measured = measure(model, batch, [])
    model.zero_grad()
    plans: dict[str, Any] = {"every_n=1": None, "every_n=2": 2}
    for mib in (200, 230, 260, 290, 310):
        plans[f"{mib} MiB"] = plan_of(measured, fastest(measured, mib * MIB, ACTIONS))

    def take(plan: Any) -> float:
        words = {"every_n": plan or 1} if not isinstance(plan, Plan) else {"plan": plan}
        with apply_partial_checkpoint(model, **words):
            model.zero_grad()
            begin = time.perf_counter()
            step(model, batch).backward()
            return time.perf_counter() - begin

    times = interleaved({name: lambda p=plan: take(p) for name, plan in plans.items()}, rounds)
    first = statistics.median(times["every_n=1"])
    print("| plan | kept, partly, recomputed | peak MiB | step, every_n=1 is 1 |")
    print("| --- | --- | --- | --- |")
    for name, plan in plans.items():
        words = {"every_n": plan or 1} if not isinstance(plan, Plan) else {"plan": plan}
        model.zero_grad()
        with apply_partial_checkpoint(model, **words) as handle, track_peak(model, batch) as t:
            step(model, batch).backward()
        actions = [block.action for block in handle.plan]
        kept, whole = actions.count("keep"), actions.count("recompute")
        ratio = statistics.median(times[name]) / first
        peak = t.peak_bytes / MIB
        counts = f"{kept}, {len(actions) - kept - whole}, {whole}"
        print(f"| {name} | {counts} | {peak:.1f} | {ratio:.3f} |")


# --- what others offer


def fronts(rounds: int) -> None:
    def plan_within(measured: Measurement, budget: int) -> Plan:
        try:
            return plan_of(measured, fastest(measured, budget, ACTIONS))
        except BudgetTooSmall:  # what is foretold is a few bytes above what is measured
            return plan_of(measured, least_peak(measured, ACTIONS))

    for size, length in ((8, 256), (2, 2048)):
        print_front(size, length, rounds, plan_within)
        print()


# --- planning


def planning(num: int = 100) -> None:
    """Blocks that are all unlike, the hardest case."""
    calls, segments, live = [], [], 10**6
    for index in range(num):
        held = 1000 + 7919 * index % 99_991
        again, given = 1 + index % 7, 4000 + 7 * index
        options: dict[Choice, Option] = {
            "recompute": Option(0, 0, 0, again),
            "keep": Option(held, held, None, 0.0),
            "recompute_saving": Option(held // 2, held // 2, held // 8, again * 0.6),
            "recompute_saving_attention": Option(held // 9, held // 9, held // 9, again * 0.9),
            "recompute_offloaded": Option(0, 0, 0, again * 1.1, moved=given, away=given),
            "keep_offloaded": Option(held, held, None, again * 0.8, moved=held, away=held + given),
        }
        back = 2 * num - 1 - 2 * index
        calls.append(Call(index, options, leaves=index + 2, returns=num + back - 3))
        segments.append(Segment("forward", index, live, live + held // 3))
        live += 5000
    for index in reversed(range(num)):
        held = calls[index].options["keep"].held
        segments.append(Segment("recompute", index, live, live + held))
        segments.append(Segment("outside", None, live + held, live + held + held // 2))
    names = tuple(map(str, range(num)))
    made_up = Measurement(names, ("B",) * num, tuple(calls), tuple(segments), 1e3, {})
    low, high = (predict(made_up, [a] * num).peak for a in ("recompute", "keep"))
    for offered in (ACTIONS, choices_with(OffloadConfig(scope="all"))):
        begin = time.perf_counter()
        fastest(made_up, (low + high) // 2, offered)
        seconds = time.perf_counter() - begin
        print(f"planning {num} unlike blocks, {len(offered)} choices: {seconds:.3f} s")


def main() -> None:
    parts = {
        "peaks": lambda _: peaks(),
        "fakes": lambda _: fakes(),
        "counted": lambda _: counted(),
        "exact": lambda _: exact(),
        "fronts": fronts,
        "hole": hole,
        "planning": lambda _: planning(),
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(parts))
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for name in [options.only] if options.only else parts:
        parts[name](options.rounds)
        print()


if __name__ == "__main__":
    main()
