"""What it costs to follow a step's memory, by each source.

    OMP_NUM_THREADS=1 MALLOC_MMAP_THRESHOLD_=8589934592 MALLOC_TRIM_THRESHOLD_=17179869184 \
    MALLOC_TOP_PAD_=268435456 MALLOC_ARENA_MAX=1 python benchmarks/monitor.py
    python benchmarks/monitor.py --epoch 100 --first 16    # what the default costs on a CPU
    python benchmarks/monitor.py --device cuda --width 2048 --batch 4 --length 4096

Training steps (forward, backward, AdamW) of the plain-torch Llama-like shape of `overhead.py`, with
and without a source, in random order in one process. Prints the ratios to a step without, of the
median wall-clock times and of the median CPU times of the process (which other work on the machine
disturbs less; on an accelerator they say nothing).
"""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from overhead import VOCABULARY, Model, interleaved, parser_of, wait_for
from torch import Tensor

from lightning_ckpt.core.memory.allocations import AllocationSteps
from lightning_ckpt.core.memory.device_steps import DeviceSteps
from lightning_ckpt.core.memory.steps import LiveSteps, StepSource


class Training:
    """One model, with or without a source around its steps."""

    def __init__(self, model: Model, tokens: Tensor) -> None:
        self.model = model
        self.tokens = tokens
        self.optimizer = torch.optim.AdamW(model.parameters())

    def step(self, source: StepSource | None) -> None:
        if source is not None:
            source.begin(self.model, [self.optimizer], self.tokens)
        loss = self.model(self.tokens)
        self.optimizer.zero_grad()
        if source is not None:
            source.forward_ended()
        loss.backward()
        if source is not None:
            source.backward_ended()
        self.optimizer.step()
        del loss
        if source is not None:
            source.end()

    def timed(self, source: StepSource | None) -> tuple[float, float]:
        """Seconds of wall-clock and of CPU time."""
        start, cpu_start = time.perf_counter(), time.process_time()
        self.step(source)
        wait_for(self.tokens.device)
        return time.perf_counter() - start, time.process_time() - cpu_start


def sources_of(device: torch.device) -> dict[str, Callable[[], StepSource]]:
    if device.type == "cpu":
        return {"live tensors": LiveSteps, "allocation events": AllocationSteps}
    return {"allocator": lambda: DeviceSteps(device)}


def main() -> None:
    parser = parser_of(__doc__, rounds=15)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epoch", type=int, default=1, help="steps that make a round")
    parser.add_argument("--first", type=int, default=1, help="how many of them are followed")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    model = Model(options.blocks, by_hand=False, width=options.width).to(device)
    tokens = torch.randint(VOCABULARY, (options.batch, options.length), device=device)
    training = Training(model, tokens)
    ways: dict[str, StepSource | None] = {"without": None}
    ways |= {name: make() for name, make in sources_of(device).items()}
    followed = [index < options.first for index in range(options.epoch)]

    def epoch(source: StepSource | None) -> tuple[float, float]:
        """Seconds of wall-clock and of CPU time of a step, the mean over the epoch."""
        seconds = [training.timed(source if follows else None) for follows in followed]
        wall, cpu = (statistics.mean(column) for column in zip(*seconds, strict=True))
        return wall, cpu

    times = interleaved(
        {name: partial(epoch, source) for name, source in ways.items()}, options.rounds
    )
    medians = {
        name: [statistics.median(c) for c in zip(*t, strict=True)] for name, t in times.items()
    }
    print("| source | s/step | wall-clock | CPU time | peak MiB |\n| --- | --- | --- | --- | --- |")
    for name, (wall, cpu) in medians.items():
        source = ways[name]
        peak = "-" if source is None else f"{source.figures.peak / 2**20:.1f}"
        base_wall, base_cpu = medians["without"]
        print(f"| {name} | {wall:.3f} | {wall / base_wall:.3f} | {cpu / base_cpu:.3f} | {peak} |")


if __name__ == "__main__":
    main()
