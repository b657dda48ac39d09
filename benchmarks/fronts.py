"""Our plans against what others offer, on a Llama of Transformers: peaks and step times on a CPU.

Theirs: the interval of Transformers (its own switch), and torch's selective checkpoint contexts
around blocks by hand, with the results of attention kept, or those of matrix products too. For each
of their points the planner gets its measured peak, and 16 KiB, as the budget, and both take their
steps in turn.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from overhead import interleaved
from shapes import Batch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from lightning_ckpt import Plan, apply_partial_checkpoint
from lightning_ckpt.core.budget.clock import Clock
from lightning_ckpt.core.budget.costs import Measurement
from lightning_ckpt.core.estimate import measure_step
from lightning_ckpt.core.memory import peak_tracker, track_peak

MIB = 2**20
Context = Callable[[], AbstractContextManager[Any]]

aten = torch.ops.aten
_ATTENTION = [aten._scaled_dot_product_flash_attention_for_cpu.default]
_SLACK = 2**14  # bytes: what is foretold of the same plan may be a few above what is measured
_PRODUCTS = [aten.mm.default, aten.addmm.default, aten.bmm.default]


def llama() -> nn.Module:
    """The shape of which the reference figures are."""
    import transformers as hf

    torch.manual_seed(0)
    config = hf.LlamaConfig(
        hidden_size=256, intermediate_size=691, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=512, max_position_embeddings=2048, use_cache=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config).train()


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    result: Any = model(**batch)
    return result if isinstance(result, torch.Tensor) else result.loss


@contextmanager
def of_transformers(model: Any, every_n: int) -> Iterator[None]:
    model.activation_checkpointing_enable(every_n_layers=every_n)
    try:
        yield
    finally:
        model.activation_checkpointing_disable()
        model.disable_input_require_grads()


@contextmanager
def of_torch(model: Any, kept: list[Any], every_n: int) -> Iterator[None]:
    contexts = partial(create_selective_checkpoint_contexts, kept)
    blocks = list(model.model.layers)[::every_n]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def theirs(model: nn.Module) -> dict[str, Context]:
    found: dict[str, Context] = {}
    for every_n in (1, 2, 3, 4, 6, 12):
        found[f"Transformers, every_n={every_n}"] = partial(of_transformers, model, every_n)
    for every_n, which in ((1, "each"), (2, "every second")):
        found[f"torch, attention kept, {which}"] = partial(of_torch, model, _ATTENTION, every_n)
        kept = _ATTENTION + _PRODUCTS
        found[f"torch, products too, {which}"] = partial(of_torch, model, kept, every_n)
    return found


def peak_of(model: nn.Module, batch: Batch, around: Context) -> int:
    model.zero_grad()
    with around(), track_peak(model, batch) as tracker:
        loss_of(model, batch).backward()
    return tracker.peak_bytes


def flops_of(model: nn.Module, batch: Batch, around: Context) -> int:
    """Counted in a step, of products and attention."""

    def attention(query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> int:
        return sdpa_flop_count(query, key, value)

    names = {aten._scaled_dot_product_flash_attention_for_cpu: attention}
    with around(), FlopCounterMode(display=False, custom_mapping=names) as counter:
        loss_of(model, batch).backward()
    model.zero_grad()
    return counter.get_total_flops()


def take(model: nn.Module, batch: Batch, around: Context) -> tuple[float, float]:
    model.zero_grad()
    with around():
        clock, cpu = time.perf_counter(), time.process_time()
        loss_of(model, batch).backward()
        return time.perf_counter() - clock, time.process_time() - cpu


def measure(model: nn.Module, batch: Batch) -> Measurement:
    model.zero_grad()
    tracker = peak_tracker("cpu", model)
    measured = measure_step(model, batch, loss_of, tracker=tracker, clock=Clock("cpu"))
    model.zero_grad()
    return measured


class Row(NamedTuple):
    """A step under one plan."""

    name: str
    peak: int
    flops: float  # against plain training

    def cells(self) -> str:
        return f"{self.name} | {self.peak / MIB:.1f} | {self.flops:.3f}"


def row_of(name: str, model: nn.Module, batch: Batch, around: Context, plain_flops: int) -> Row:
    flops = flops_of(model, batch, around) / plain_flops
    return Row(name, peak_of(model, batch, around), flops)


def ratios(
    model: nn.Module, batch: Batch, ours: Context, theirs: Context, rounds: int
) -> list[float]:
    """Times of ours to theirs, by the clock and by CPU time: the median over rounds, in each of
    which both take a step, one right after the other."""
    times = interleaved(
        {
            name: partial(take, model, batch, around)
            for name, around in zip("ab", (ours, theirs), strict=True)
        },
        rounds,
    )
    pairs = [(a, b) for a, b in zip(times["a"], times["b"], strict=True)]
    return [statistics.median(a[which] / b[which] for a, b in pairs) for which in (0, 1)]


def words(plan: Plan) -> str:
    actions = [block.action for block in plan]
    counts = {"kept": "keep", "products": "recompute_saving"}
    counts |= {"attention": "recompute_saving_attention", "nothing": "recompute"}
    parts = [f"{actions.count(a)} {word}" for word, a in counts.items() if a in actions]  # type: ignore[comparison-overlap]
    return ", ".join(parts)


def print_front(
    size: int, length: int, rounds: int, plan_for: Callable[[Measurement, int], Plan]
) -> None:
    """Print the table of batches of `size` x `length` tokens. Ours is named by what is held of how
    many blocks."""
    model = llama()
    tokens = torch.randint(512, (size, length))
    batch = {"input_ids": tokens, "labels": tokens}
    for _ in range(2):
        take(model, batch, nullcontext)
    measured = measure(model, batch)
    plain = flops_of(model, batch, nullcontext)
    peak = peak_of(model, batch, nullcontext)
    print(f"{size} x {length} tokens, plain {peak / MIB:.1f} MiB; times are ours to theirs")
    print("| theirs | MiB | FLOPs | ours | MiB | FLOPs | clock | CPU time |")
    print("| --- " * 8 + "|")
    for name, around in theirs(model).items():
        their = row_of(name, model, batch, around, plain)
        plan = plan_for(measured, their.peak + _SLACK)
        own = partial(apply_partial_checkpoint, model, plan=plan)
        our = row_of(words(plan), model, batch, own, plain)
        times = " | ".join(f"{t:.3f}" for t in ratios(model, batch, own, around, rounds))
        print(f"| {their.cells()} | {our.cells()} | {times} |", flush=True)
