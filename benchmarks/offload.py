"""Offload against the same plan without: bytes, peak and step time, as a Markdown table.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 \
    MALLOC_TOP_PAD_=268435456 MALLOC_ARENA_MAX=1 python benchmarks/offload.py
    python benchmarks/offload.py --device cuda     # some minutes on one GPU; pip install trl, too

A Llama of the Transformers library, every block checkpointed. Steps of all rows are taken in turn
in one process; times are ratios of medians to the same plan without offload. On a CPU the target
is "disk" (a file in --directory, page cache warm), on a device "host" and "disk" by way of pinned
memory, and there stand beside them what Transformers and TRL offer, with the same blocks
checkpointed.

`freed` is how many bytes less are held between forward and backward, as a share of what the
arithmetic says: (blocks - keep_last) x bytes of one block's input. `gradients` are compared bit by
bit with the plan without offload (with "no" in both, the device's own kernels are not
deterministic).
"""

import argparse
import copy
import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from overhead import interleaved
from plans import machine, wait_for
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_ckpt import OffloadConfig, apply_partial_checkpoint
from lightning_ckpt.core.memory import track_peak

MIB = 2**20
SHAPES = {  # blocks, width, batch, length, dtype
    "cpu": (12, 256, 8, 1024, torch.float32),
    "cuda": (24, 2048, 1, 8192, torch.bfloat16),
}


class Row(NamedTuple):
    """A way to train the model.

    Attributes:
        model: its own module over the parameters that all rows share.
        around: the context of each forward.
        settle: waits until what is to leave has left.
        expected: bytes that should have left after forward.
        report: what was moved, if that is known.
    """

    model: nn.Module
    around: Callable[[], AbstractContextManager[Any]]
    settle: Callable[[], None]
    expected: int
    report: Callable[[], Any]


def make_model(blocks: int, width: int, length: int) -> nn.Module:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=round(2.7 * width),
        num_hidden_layers=blocks,
        num_attention_heads=width // 128 if width >= 1024 else 8,
        num_key_value_heads=width // 128 if width >= 1024 else 8,
        vocab_size=512,
        max_position_embeddings=length,
    )
    return LlamaForCausalLM(config)


def twin(model: nn.Module) -> nn.Module:
    """Another module with the same parameters."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


def ours(model: nn.Module, offload: bool | OffloadConfig, input_bytes: int) -> Row:
    own = twin(model)
    handle = apply_partial_checkpoint(own, offload=offload)
    own.handle = handle  # keeps the plan in force
    expected = 0
    if isinstance(offload, OffloadConfig):
        expected = (len(handle.plan) - offload.keep_last) * input_bytes
    offloader = handle.offloader
    if offloader is None:
        return Row(own, nullcontext, lambda: None, expected, lambda: None)
    return Row(own, nullcontext, offloader.settle, expected, offloader.report)


def theirs(model: nn.Module, library: str, expected: int) -> Row:
    own = twin(model)
    own.train()
    if library == "transformers":
        own.activation_checkpointing_enable(offload=True)
        return Row(own, nullcontext, lambda: None, expected, lambda: None)
    from trl.models.activation_offloading import OffloadActivations

    own.activation_checkpointing_enable()
    manager = OffloadActivations()
    return Row(own, lambda: manager, lambda: None, expected, lambda: None)


def configs_for(device: torch.device, directory: str | None) -> Iterator[tuple[str, OffloadConfig]]:
    """What is measured of ours, by the names of the rows."""
    for keep_last in (1, 0):
        if device.type != "cpu":
            yield f"host, keep_last={keep_last}", OffloadConfig("host", keep_last=keep_last)
        disk = OffloadConfig("disk", directory=directory, keep_last=keep_last)
        yield f"disk, keep_last={keep_last}", disk


def rows_for(model: nn.Module, device: torch.device, directory: str | None, size: int) -> Any:
    rows = {"no offload": ours(model, False, size)}
    rows |= {name: ours(model, config, size) for name, config in configs_for(device, directory)}
    if device.type == "cpu":
        return rows
    blocks = model.config.num_hidden_layers
    rows["Transformers offload=True"] = theirs(model, "transformers", blocks * size)
    if importlib.util.find_spec("trl"):
        rows["TRL OffloadActivations"] = theirs(model, "trl", blocks * size)
    else:
        print("TRL is not installed: not measured\n")
    return rows


def forward(row: Row, tokens: Tensor) -> Tensor:
    with row.around():
        return row.model(input_ids=tokens, labels=tokens, use_cache=False).loss


def measure(row: Row, tokens: Tensor) -> tuple[int, int, list[Tensor]]:
    """Peak, bytes held after forward, and gradients."""
    row.model.zero_grad(set_to_none=True)
    with track_peak(row.model, tokens, device=tokens.device) as tracker:
        before = tracker.current_bytes
        loss = forward(row, tokens)
        wait_for(tokens.device)
        row.settle()
        held = tracker.current_bytes - before
        loss.backward()
    return tracker.peak_bytes, held, [p.grad.cpu() for p in row.model.parameters()]


def seconds(row: Row, tokens: Tensor) -> float:
    row.model.zero_grad(set_to_none=True)
    wait_for(tokens.device)
    start = time.perf_counter()
    forward(row, tokens).backward()
    wait_for(tokens.device)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=7)
    for name in ("blocks", "width", "batch", "length"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--directory", help="of the file")
    options = parser.parse_args()
    device = torch.device(options.device)
    *numbers, dtype = SHAPES["cpu" if device.type == "cpu" else "cuda"]
    given = (options.blocks, options.width, options.batch, options.length)
    blocks, width, batch, length = (g or n for g, n in zip(given, numbers, strict=True))
    torch.manual_seed(0)
    model = make_model(blocks, width, length).to(device, dtype)
    tokens = torch.randint(512, (batch, length), device=device)
    input_bytes = batch * length * width * dtype.itemsize
    rows = rows_for(model, device, options.directory, input_bytes)
    for row in rows.values():
        forward(row, tokens).backward()  # kernels, allocator, pinned memory and file are warm
    measured = {name: measure(row, tokens) for name, row in rows.items()}
    again = measure(rows["no offload"], tokens)[2]
    reports = {name: row.report() for name, row in rows.items()}
    times = interleaved(
        {name: (lambda row=row: seconds(row, tokens)) for name, row in rows.items()}, options.rounds
    )
    print(
        f"{machine(device)}, torch {torch.__version__}; {blocks} blocks of width {width}, "
        f"{batch} x {length} tokens, {dtype}; {options.rounds} rounds\n"
    )
    print_table(rows, measured, times, again)
    for name, report in reports.items():
        if report is not None:
            print(f"\n{name}: {report}")


def print_table(
    rows: dict[str, Row],
    measured: dict[str, tuple[int, int, list[Tensor]]],
    times: dict[str, list[float]],
    again: list[Tensor],
) -> None:
    base = statistics.median(times["no offload"])
    _, held, gradients = measured["no offload"]
    print("| plan | step | peak MiB | held after forward MiB | freed | gradients equal |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, row in rows.items():
        peak, here, own = measured[name]
        own = again if name == "no offload" else own
        freed = f"{(held - here) / row.expected:.4f}" if row.expected else "-"
        equal = all(map(torch.equal, own, gradients))
        print(
            f"| {name} | {statistics.median(times[name]) / base:.3f} | {peak / MIB:.1f} | "
            f"{here / MIB:.1f} | {freed} | {'yes' if equal else 'no'} |"
        )


if __name__ == "__main__":
    main()
