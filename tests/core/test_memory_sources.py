"""A step's memory by its parts: by hand, from each CPU source, and against torch's profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, schedule

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core import _torch
from lightning_ckpt.core.memory import allocations, step_source
from lightning_ckpt.core.memory.allocations import AllocationSteps
from lightning_ckpt.core.memory.breakdown import PARTS, Marks, StepFigures, read_events
from lightning_ckpt.core.memory.peak import PeakUnavailable
from lightning_ckpt.core.memory.steps import LiveSteps, StepSource

KIB = 1024
SOURCES = [LiveSteps, AllocationSteps]


@pytest.fixture(autouse=True)
def _nothing_left_on() -> Iterator[None]:
    yield
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not _torch.profiler_in_use()


class Layers(nn.Module):
    """`num_layers` times x -> sin(W x), without a bias: W and x of (256, 256) are 256 KiB each."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256, bias=False) for _ in range(num_layers))
        self.register_buffer("scale", torch.ones(2, 256))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).sin()
        return x.mul(self.scale[0])


def train_step(
    source: StepSource, model: nn.Module, optimizers: list[torch.optim.Optimizer], x: Tensor
) -> StepFigures:
    """One step as Lightning does it: old gradients live until forward is over."""
    source.reset()
    source.begin(model, optimizers, x)
    loss = model(x).sum()
    for optimizer in optimizers:
        optimizer.zero_grad()
    source.forward_ended()
    loss.backward()
    source.backward_ended()
    for optimizer in optimizers:
        optimizer.step()
    del loss
    source.end()
    return StepFigures(source.figures.peak, source.figures.parts, source.figures.activations)


def in_kib(figures: StepFigures) -> dict[str, float]:
    return {part: num_bytes / KIB for part, num_bytes in figures.parts.items()}


# --- the arithmetic


class Piece:
    def __init__(self, kind: str | None = None) -> None:
        self.kind = kind


def figures_of(*steps: tuple[Piece, int], marks: Marks) -> StepFigures:
    return read_events([(piece, change, 0) for piece, change in steps], marks)


def test_parts_at_the_peak_and_activations_at_the_end_of_forward() -> None:
    weight, batch, a, b, temp, grad = Piece("parameters"), *(Piece() for _ in range(4)), Piece()
    grad.kind = "gradients"
    figures = figures_of(
        (weight, 100),
        (batch, 7),
        (a, 30),
        (temp, 50),  # in forward, gone before it ends
        (temp, -50),
        (b, 20),
        (grad, 100),
        (b, -20),
        (a, -30),
        marks=Marks(num_before=2, forward_ends=[6], backward_ends=[8]),
    )
    assert figures == StepFigures(
        257,
        {**dict.fromkeys(PARTS, 0), "parameters": 100, "gradients": 100, "activations": 50}
        | {"other": 7},
        50,
    )


def test_what_backward_and_the_update_make_is_other() -> None:
    a, recomputed, temp = Piece(), Piece(), Piece()
    marks = Marks(forward_ends=[1], backward_ends=[3])
    changes = [(a, 1), (recomputed, 5), (recomputed, -5), (temp, 9), (temp, -9), (a, -1)]
    figures = figures_of(*changes, marks=marks)
    assert figures.parts["activations"] == 1
    assert figures.parts["other"] == 9
    assert figures.activations == 1


def test_several_forwards_in_a_step() -> None:
    """A GAN's step: the second forward's activations are no temporaries of the first backward."""
    a, b, c = Piece(), Piece(), Piece()
    marks = Marks(forward_ends=[1, 4], backward_ends=[2, 5])
    figures = figures_of((a, 10), (a, -10), (b, 25), (c, 5), (b, -25), (c, -5), marks=marks)
    assert figures.activations == 30
    assert figures.parts == {**dict.fromkeys(PARTS, 0), "activations": 30}


def test_what_the_first_backward_made_is_no_activation_of_the_second_forward() -> None:
    a, temp, b = Piece(), Piece(), Piece()
    changes = [(a, 10), (temp, 7), (a, -10), (b, 25), (temp, -7), (b, -25)]
    marks = Marks(forward_ends=[1, 4], backward_ends=[3, 6])
    figures = figures_of(*changes, marks=marks)
    assert figures.activations == 25
    assert figures.parts["other"] == 7


def test_the_largest_forward_of_a_step_counts() -> None:
    a, b = Piece(), Piece()
    marks = Marks(forward_ends=[1, 3], backward_ends=[2, 4])
    figures = figures_of((a, 40), (a, -40), (b, 25), (b, -25), marks=marks)
    assert figures.activations == 40


def test_what_outlives_the_step_is_not_held_for_backward() -> None:
    kept, a = Piece(), Piece()
    figures = figures_of((kept, 10), (a, 5), (a, -5), marks=Marks(forward_ends=[2]))
    assert figures.activations == 5
    assert figures.parts["other"] == 10


def test_what_was_there_before_is_no_activation() -> None:
    """Something that the step let go of, and that nothing named."""
    before, a = Piece(), Piece()
    changes = [(before, 10), (a, 5), (before, -10), (a, -5)]
    figures = figures_of(*changes, marks=Marks(num_before=1, forward_ends=[2]))
    assert figures.activations == 5
    assert figures.parts["other"] == 10


def test_no_backward_no_activations() -> None:
    figures = figures_of((Piece(), 10), marks=Marks())
    assert figures.activations is None
    assert figures.parts["other"] == 10


def test_a_storage_that_grew_counts_once_more() -> None:
    a = Piece()
    figures = figures_of((a, 10), (a, 30), (a, -40), marks=Marks(forward_ends=[2]))
    assert figures.peak == 40
    assert figures.activations == 40


# --- each source


@pytest.mark.parametrize("make", SOURCES)
def test_parts_by_hand(make: Callable[[], StepSource]) -> None:
    model = Layers(4)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)
    x = torch.randn(256, 256)
    source = make()
    first = train_step(source, model, [optimizer], x)  # the peak is in the update
    assert in_kib(first)["optimizer_states"] == pytest.approx(8 * 256, abs=1)
    for _ in range(2):
        figures = train_step(source, model, [optimizer], x)
        parts = in_kib(figures)
        assert sum(figures.parts.values()) == figures.peak
        assert parts["parameters"] == 4 * 256
        assert parts["buffers"] == 2
        assert parts["optimizer_states"] == pytest.approx(8 * 256, abs=1)  # and step counts
        # Held: each layer's input but the first, which is the batch; and the inputs of `sin`. The
        # result of `mul` is not, nor the last `sin`, whose factor needs no gradient; the loss is.
        assert figures.activations / KIB == pytest.approx((3 + 4) * 256, abs=1)
    source.stop()


@pytest.mark.parametrize("make", SOURCES)
def test_old_gradients_are_gradients_until_they_are_cleared(
    make: Callable[[], StepSource],
) -> None:
    """Gradients that came in a step that nobody followed, cleared in one that is."""
    model, x = Layers(4), torch.randn(4, 256)
    model(x).sum().backward()
    source = make()
    figures = train_step(source, model, [torch.optim.SGD(model.parameters())], x)
    assert in_kib(figures)["gradients"] == 4 * 256  # the old ones, and not beside the new ones
    assert figures.peak / KIB == pytest.approx(8 * 256, abs=100)
    source.stop()


@pytest.mark.parametrize("make", SOURCES)
def test_gradients_that_the_step_clears_were_gradients(make: Callable[[], StepSource]) -> None:
    model, x = Layers(4), torch.randn(4, 256)
    source = make()
    source.begin(model, [], x)
    loss = model(x).sum()
    source.forward_ended()
    loss.backward()
    source.backward_ended()
    torch.empty(512 * 256)
    model.zero_grad()
    source.end()
    assert source.figures.parts["gradients"] == 4 * 256 * KIB
    assert source.figures.parts["other"] == pytest.approx((512 + 4) * KIB, abs=KIB)
    source.stop()


@pytest.mark.parametrize("make", SOURCES)
def test_lazy_parameters_have_no_memory_before_their_first_call(
    make: Callable[[], StepSource],
) -> None:
    model, x = nn.LazyLinear(256, bias=False), torch.randn(4, 256)
    source = make()
    train_step(source, model, [], x)
    assert source.figures.parts["parameters"] == 256 * KIB
    source.stop()


@pytest.mark.parametrize("every_n", [None, 1, 2])
def test_sources_agree_with_each_other_and_with_the_profiler(every_n: int | None) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    model, x = nn.TransformerEncoder(layer, 4), torch.randn(8, 64, 64)
    if every_n is not None:
        apply_partial_checkpoint(model, every_n=every_n)
    optimizer = torch.optim.AdamW(model.parameters())
    found = []
    for make in SOURCES:
        source = make()
        train_step(source, model, [optimizer], x)
        found.append(train_step(source, model, [optimizer], x))
        source.stop()
    live, allocated = found
    assert allocated.peak == pytest.approx(live.peak, rel=0.005)
    # No operation makes the generator's state that torch's checkpoint keeps for each block.
    states = 4 * 5056 if every_n else 0
    assert allocated.activations == pytest.approx(live.activations, abs=states + 256)
    for part in PARTS:
        assert allocated.parts[part] == pytest.approx(live.parts[part], abs=32 * KIB)
    above_start = live.peak - held_before(model, optimizer, x)
    assert above_start == pytest.approx(profiled_peak(model, optimizer, x), rel=0.01)


def held_before(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> int:
    source = LiveSteps()
    source.begin(model, [optimizer], x)
    source.stop()
    return source.current_bytes


def profiled_peak(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> int:
    """Bytes above the start of a step, by the public profiler."""

    def step() -> None:
        loss = model(x).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True):
        step()  # so that the gradients that the next one clears are known to the profiler
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    live = peak = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("make", SOURCES)
def test_equal_steps_are_equal_to_the_byte(make: Callable[[], StepSource]) -> None:
    model, x = Layers(3), torch.randn(16, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    source = make()
    figures = [train_step(source, model, [optimizer], x) for _ in range(4)]
    assert figures[1] == figures[2] == figures[3]
    source.stop()


@pytest.mark.parametrize("make", SOURCES)
def test_epoch_keeps_the_highest_step(make: Callable[[], StepSource]) -> None:
    model = Layers(2)
    source = make()
    source.reset()
    for rows in (16, 256, 32):
        x = torch.randn(rows, 256)
        source.begin(model, [], x)
        loss = model(x).sum()
        source.forward_ended()
        loss.backward()
        source.backward_ended()
        model.zero_grad()
        source.end()
    assert source.figures.num_steps == 3
    assert source.figures.activations / KIB == pytest.approx(3 * 256, abs=1)
    assert sum(source.figures.parts.values()) == source.figures.peak
    source.reset()
    assert source.figures.num_steps == source.figures.peak == 0
    source.stop()


@pytest.mark.parametrize("make", SOURCES)
def test_abandoned_step_has_no_figure(make: Callable[[], StepSource]) -> None:
    model, x = Layers(1), torch.randn(16, 256)
    source = make()
    source.begin(model, [], x)
    model(x)
    source.abandon()
    assert source.figures.num_steps == 0
    assert not _torch.profiler_in_use()
    train_step(source, model, [], x)
    assert source.figures.num_steps == 1
    source.stop()


def test_sharded_parameters_count_by_their_local_part(gloo: None) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Layers(2)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    source = LiveSteps()
    x = torch.randn(16, 256)
    train_step(source, model, [optimizer], x)
    parts = in_kib(train_step(source, model, [optimizer], x))
    assert parts["parameters"] == 2 * 256
    assert parts["optimizer_states"] == pytest.approx(4 * 256, abs=1)
    source.stop()


# --- the allocation events keep out of the way of other profilers


def test_step_source_chooses_by_what_is_compiled() -> None:
    model = Layers(1)
    assert isinstance(step_source("cpu", model), LiveSteps)
    model.layers[0].compile(backend="eager")
    assert isinstance(step_source("cpu", model), AllocationSteps)
    with pytest.raises(PeakUnavailable, match="MPS"):
        step_source("mps")


def test_compiled_code_runs_compiled() -> None:
    graphs: list[Any] = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    model, x = Layers(2), torch.randn(16, 256)
    eager = train_step(LiveSteps(), model, [], x)
    model.compile(backend=backend)
    source = step_source("cpu", model)
    figures = train_step(source, model, [], x)
    assert len(graphs) == 1
    model.zero_grad()
    figures = train_step(source, model, [], x)
    assert len(graphs) == 1
    assert figures.peak == pytest.approx(eager.peak, rel=0.05)


def test_end_that_is_told_twice_counts_once() -> None:
    """By the allocator and by the weak reference; then the address is used anew."""
    step = allocations._Step()
    tensor = torch.ones(256)
    step.hold(tensor, None)
    address, began = tensor.data_ptr(), step.began
    del tensor
    recorded = [
        _torch.Allocation(began + 1, address, -KIB),
        _torch.Allocation(began + 2, address, 2 * KIB),
    ]
    events, _ = step.replay(recorded)
    assert [num_bytes for _, num_bytes, _ in events] == [KIB, -KIB, 2 * KIB]


def test_running_profiler_is_left_alone() -> None:
    model, x = Layers(1), torch.randn(4, 256)
    with profile(profile_memory=True) as theirs:
        with pytest.raises(PeakUnavailable, match="profiler is in use"):
            AllocationSteps().begin(model, [], x)
        model(x)
    assert any(event.name == "aten::sin" for event in theirs.events())
    del theirs


def test_profiler_that_waits_is_left_alone() -> None:
    """Between its steps it does not run; torch 2.13 ends the process if another one starts."""
    model, x = Layers(1), torch.randn(4, 256)
    with profile(schedule=schedule(wait=1, warmup=1, active=1)) as theirs:
        for _ in range(3):
            with pytest.raises(PeakUnavailable, match="profiler is in use"):
                AllocationSteps().begin(model, [], x)
            model(x)
            theirs.step()
    del theirs


def test_profiler_that_begins_in_the_step_works_and_the_step_has_no_figure() -> None:
    model, x = Layers(1), torch.randn(4, 256)
    source = AllocationSteps()
    source.begin(model, [], x)
    with profile() as theirs:
        model(x)
    assert any(event.name == "aten::sin" for event in theirs.events())
    del theirs
    with pytest.raises(PeakUnavailable, match="took ours off"):
        source.end()
    assert source.figures.num_steps == 0
