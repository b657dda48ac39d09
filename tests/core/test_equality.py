"""Training with checkpointed blocks is plain training, bit by bit, whatever the blocks do."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from helpers import (
    DIM,
    MlpBlock,
    Stack,
    assert_same,
    batch,
    compare,
    generator_states,
    square_step,
    stack_of,
)
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_ckpt import apply_partial_checkpoint, is_recomputing

# --- randomness


@pytest.mark.parametrize("every_n", [1, 2, 3, 9])
def test_dropout(every_n: int) -> None:
    """Report D1, D2: the masks of forward and recompute are the same, over several steps."""
    compare(Stack, every_n=every_n, steps=4)


class DropPathBlock(MlpBlock):
    """Stochastic depth per sample: the branch is dropped for random rows."""

    def forward(self, x: Tensor) -> Tensor:
        keep = torch.empty(x.shape[0], 1).bernoulli_(0.5)
        return x + keep * self.down(torch.tanh(self.up(x)))


def test_drop_path() -> None:
    """Report D1: drop-path masks in the recompute are those of the forward."""
    compare(stack_of(DropPathBlock))


class PythonNoiseBlock(MlpBlock):
    """Scales the branch by a draw from Python's `random`."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * random.random())


class NumpyNoiseBlock(MlpBlock):
    """Scales the branch by a draw from NumPy's global generator."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * float(np.random.rand()))


class LateDrawBlock(MlpBlock):
    """Draws from all three generators between and after its layers."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x) * random.gauss(1.0, 0.1)
        h = self.dropout(torch.tanh(h)) * float(np.random.normal(1.0, 0.1))
        return x + self.down(h) * random.choice((0.5, 1.0, 2.0))


class LayerDropBlock(MlpBlock):
    """Skips itself with probability 0.5, drawn from Python's `random` inside the block."""

    def forward(self, x: Tensor) -> Tensor:
        return x if random.random() < 0.5 else super().forward(x)


class NumpyLayerDropBlock(MlpBlock):
    """Skips itself with probability 0.5, drawn from NumPy inside the block."""

    def forward(self, x: Tensor) -> Tensor:
        return x if np.random.rand() < 0.5 else super().forward(x)


@pytest.mark.parametrize(
    "block",
    [PythonNoiseBlock, NumpyNoiseBlock, LateDrawBlock],
    ids=["random", "numpy", "all three"],
)
def test_draws_from_python_and_numpy(block: type[nn.Module]) -> None:
    """Report D3, pitfall 2: such draws are replayed, and no stream moves on differently."""
    compare(stack_of(block))


class SeedingBlock(MlpBlock):
    """Seeds the global generators itself, so that they stand the same before and after it."""

    def forward(self, x: Tensor) -> Tensor:
        random.seed(1)
        np.random.seed(1)
        return super().forward(x * random.random() * float(np.random.rand()))


def test_a_block_that_seeds_leaves_the_generators_of_backward_alone() -> None:
    """Report D1: others may have drawn since the forward."""
    model = stack_of(SeedingBlock)()
    with apply_partial_checkpoint(model):
        square_step(model, 0)
        loss = model(batch(1)).pow(2).mean()
        random.random()
        np.random.rand()
        before = generator_states()
        loss.backward()
    assert_same(generator_states(), before)


@pytest.mark.parametrize("block", [LayerDropBlock, NumpyLayerDropBlock], ids=["random", "numpy"])
def test_layer_drop_inside_a_block(block: type[nn.Module]) -> None:
    """Report D3: a block that skips itself skips itself in the recompute too."""
    compare(stack_of(block, 4), steps=4, ratio=None)


class LayerDropStack(Stack):
    """Layer drop outside the block, as in Wav2Vec2: the loop skips layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            if float(np.random.uniform()) > 0.5:
                x = layer(x)
        return self.head(x)


def test_layer_drop_outside_a_block() -> None:
    """Report D3: skipped layers are fine, their gradient is absent as in plain training."""
    _, plain = compare(LayerDropStack, steps=4)
    skipped = [g for grads in plain.grads for n, g in grads.items() if n.startswith("layers")]
    assert any(g is None for g in skipped)


class PrivateTorch(MlpBlock):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        noise = torch.rand(1, generator=self.generator)
        return x + self.down(torch.tanh(self.up(x)) * noise)


class PrivateRandom(MlpBlock):
    """Draws from a `random.Random` of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * self.generator.random())


class PrivateNumpy(MlpBlock):
    """Draws from a NumPy generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * float(self.generator.random()))


@pytest.mark.parametrize(
    "block", [PrivateTorch, PrivateRandom, PrivateNumpy], ids=["torch", "random", "numpy"]
)
def test_private_generators(block: type[nn.Module]) -> None:
    """Pitfall 2: a generator that the block keeps as an attribute is replayed as well."""
    compare(stack_of(block))


def test_error_in_the_recompute_leaves_the_generators_alone() -> None:
    """Report D3: the streams go on from where they were when the recompute raised."""

    class Failing(LateDrawBlock):
        def forward(self, x: Tensor) -> Tensor:
            y = torch.sin(super().forward(x))
            if is_recomputing():
                raise RuntimeError("boom")
            return torch.sin(y)

    model = Stack(Failing, 3)
    with apply_partial_checkpoint(model):
        loss = model(batch(0)).sum()
        before = generator_states()
        with pytest.raises(RuntimeError, match="boom"):
            loss.backward()
    assert_same(generator_states(), before)


def test_backward_leaves_the_generators_alone() -> None:
    """A draw between forward and backward, and one after, see the streams of plain training."""

    def step(model: nn.Module, index: int) -> tuple[Tensor, float, float, Tensor]:
        loss = model(batch(index)).pow(2).mean()
        drawn = random.random(), float(np.random.rand())
        loss.backward()
        return loss.detach(), *drawn, torch.rand(2)

    compare(stack_of(LateDrawBlock), step)


def test_draws_between_forward_and_backward_of_another_seed() -> None:
    """Reseeding between forward and backward does not change the recompute, nor is it undone."""

    def step(model: nn.Module, index: int) -> tuple[Tensor, float]:
        loss = model(batch(index)).pow(2).mean()
        random.seed(index)
        np.random.seed(index)
        torch.manual_seed(index)
        loss.backward()
        return loss.detach(), random.random()

    compare(stack_of(LateDrawBlock), step)


# --- state that a forward changes


class BatchNormBlock(nn.Module):
    """A residual block with BatchNorm."""

    def __init__(self, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.norm = nn.BatchNorm1d(DIM, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.up(x)))


class CumulativeBatchNormBlock(BatchNormBlock):
    """BatchNorm with a cumulative average, which depends on the batch counter."""

    def __init__(self) -> None:
        super().__init__(momentum=None)


batch_norm_blocks = pytest.mark.parametrize(
    "block", [BatchNormBlock, CumulativeBatchNormBlock], ids=["momentum 0.1", "cumulative"]
)


@batch_norm_blocks
@pytest.mark.parametrize("every_n", [1, 2])
def test_batch_norm(block: type[nn.Module], every_n: int) -> None:
    """Report C1, C3, pitfall 4: statistics and batch counter move once per step."""
    ours, _ = compare(stack_of(block), every_n=every_n, steps=3)
    assert int(ours.tensors["layers.0.norm.num_batches_tracked"]) == 3


@batch_norm_blocks
def test_forward_only_training_pass_updates_statistics(block: type[nn.Module]) -> None:
    """Report C2: the update happens in the forward, whether or not a backward follows."""

    def step(model: nn.Module, index: int) -> Tensor:
        with torch.no_grad():
            model(batch(10 + index))
        model(batch(20 + index))  # recorded by autograd, but no backward follows
        return square_step(model, index)

    ours, _ = compare(stack_of(block), step, ratio=None)
    assert int(ours.tensors["layers.0.norm.num_batches_tracked"]) == 9


class SyncedStatisticsBlock(BatchNormBlock):
    """Reads the statistics it has just moved, as a data-dependent initialisation does."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y - 0.1 * self.norm.running_mean


def test_output_that_depends_on_the_moving_statistics() -> None:
    """Report C1: the recompute sees the values that the forward saw."""
    compare(stack_of(SyncedStatisticsBlock))


class OldSpectralNormBlock(nn.Module):
    """Hook-style spectral norm: `u` and `v` are buffers, `weight` a plain attribute."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch: "is deprecated"
            self.up = nn.utils.spectral_norm(nn.Linear(DIM, DIM))
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class NewSpectralNormBlock(nn.Module):
    """Parametrization-style spectral norm."""

    def __init__(self) -> None:
        super().__init__()
        self.up = spectral_norm(nn.Linear(DIM, DIM))
        self.down = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


@pytest.mark.parametrize(
    "block", [OldSpectralNormBlock, NewSpectralNormBlock], ids=["old hook", "parametrization"]
)
@pytest.mark.parametrize("every_n", [1, 2])
def test_spectral_norm(block: type[nn.Module], every_n: int) -> None:
    """Report C4: the power iteration moves once, the recompute starts where the forward did."""
    compare(stack_of(block), every_n=every_n, steps=4, ratio=None)


class Stateful(nn.Module):
    """Base of blocks whose state enters their output, so that a stale value shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.register_buffer("state", torch.ones(DIM))
        self.calls = 0

    def move(self, h: Tensor) -> None:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x) * self.state)
        self.move(h)
        return x + h * self.state


class InPlaceCodebook(Stateful):
    """An exponential average that is changed in place under no_grad."""

    @torch.no_grad()
    def move(self, h: Tensor) -> None:
        self.state = self.state.clone()  # autograd still needs the old one for backward
        self.state.mul_(0.9).add_(h.mean(0), alpha=0.1)


class DataCopyCodebook(Stateful):
    """An average written with `.data.copy_`, which autograd's version counter does not see."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        y = x + h * self.state.clone()
        self.state.data.copy_(self.state * 0.9 + h.detach().mean(0) * 0.1)
        return y


class ReboundCodebook(Stateful):
    """The buffer is bound anew in each forward."""

    def move(self, h: Tensor) -> None:
        self.state = (0.9 * self.state + 0.1 * h.mean(0)).detach()


class ExpertLoad(Stateful):
    """A load counter that is changed in place and steers the next call (pitfall 5)."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        bias = 1.0 / (1.0 + self.state)
        with torch.no_grad():
            self.state += torch.bincount(h.argmax(-1), minlength=DIM)
        return x + h * bias


class IntegerCounter(Stateful):
    """A plain int attribute that the block counts up and computes with."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + torch.tanh(self.up(x) / self.calls)


class WarmupFlag(Stateful):
    """Initialises its state from the first batch: another path in the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        if not self.ready:
            self.state = h.detach().abs().amax(0) + 1.0
            self.ready = True
        return x + torch.tanh(h / self.state)


STATEFUL = [
    InPlaceCodebook,
    DataCopyCodebook,
    ReboundCodebook,
    ExpertLoad,
    IntegerCounter,
    WarmupFlag,
]


@pytest.mark.parametrize("block", STATEFUL, ids=lambda b: b.__name__)
def test_state_moves_once(block: type[nn.Module]) -> None:
    """Report C4, pitfall 5: buffers and counters end as in plain training, and gradients agree."""
    compare(stack_of(block))


class Looped(Stack):
    """One block is called three times per forward."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for _ in range(3):
            for layer in self.layers:
                x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("block", [*STATEFUL, BatchNormBlock], ids=lambda b: b.__name__)
def test_state_of_a_block_that_is_called_several_times(block: type[nn.Module]) -> None:
    """Report C4, F4: each recompute sees the state that its own call saw."""
    compare(lambda: Looped(block, 2))


@pytest.mark.parametrize("block", [*STATEFUL, NewSpectralNormBlock], ids=lambda b: b.__name__)
def test_state_with_two_forwards_before_one_backward(block: type[nn.Module]) -> None:
    """Report C4, F4: the state moved on between the forward and its recompute."""
    compare(stack_of(block), siamese_step, ratio=None)


@pytest.mark.parametrize("block", [*STATEFUL, BatchNormBlock], ids=lambda b: b.__name__)
def test_state_with_backward_twice(block: type[nn.Module]) -> None:
    """Report C4, F2: several recomputes of one forward leave no trace either."""
    compare(stack_of(block), retain_step, ratio=None)


class Stash(MlpBlock):
    """Keeps its last activation, and what it looked like, as plain attributes."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.up(x))
        self.last = h.detach()
        self.shapes = tuple(h.shape)
        self.term = h.pow(2).mean()
        return torch.sin(x + self.down(self.dropout(h)))


def test_stashed_activation() -> None:
    """Report C5: an auxiliary loss that is left on the module keeps its gradient, counted once."""

    def step(model: nn.Module, index: int) -> tuple[Any, ...]:
        y = model(batch(index))
        loss = y.pow(2).mean() + torch.stack([layer.term for layer in model.layers]).sum()
        loss.backward()
        return (
            loss.detach(),
            [layer.last.clone() for layer in model.layers],
            [layer.term.detach() for layer in model.layers],
            [layer.shapes for layer in model.layers],
        )

    compare(stack_of(Stash), step)


class History(MlpBlock):
    """Appends to a list and writes into a dict that it keeps as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.history: list[float] = []
        self.table: dict[str, int] = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.history.append(1.0)
        self.table["calls"] += 1
        return torch.sin(super().forward(x) / len(self.history))


def test_containers_kept_as_attributes() -> None:
    """Pitfall 5: counters inside a list or a dict on the block."""

    def step(model: nn.Module, index: int) -> tuple[Any, ...]:
        loss = square_step(model, index)
        return loss, [len(m.history) for m in model.layers], [m.table for m in model.layers]

    compare(stack_of(History), step)


class Metered(MlpBlock):
    """Updates a torchmetrics metric in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = torchmetrics.MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(super().forward(x))
        self.metric.update(y.detach())
        return torch.sin(y)


def test_metric_inside_a_block() -> None:
    """Pitfall 26: a metric that lives in a block is updated once per step."""

    def step(model: nn.Module, index: int) -> tuple[Any, ...]:
        loss = square_step(model, index)
        return loss, [float(m.metric.compute()) for m in model.layers]

    compare(stack_of(Metered), step)


class MomentumTeacher(MlpBlock):
    """Moves a frozen twin of its layer in each forward, then computes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(DIM, 2 * DIM).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for old, new in zip(self.teacher.parameters(), self.up.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
        return x + self.down(torch.tanh(self.up(x)) * self.teacher(x).detach())


def test_frozen_parameters_that_the_forward_moves() -> None:
    """Report C4: state that is kept in frozen parameters moves once, too."""
    compare(stack_of(MomentumTeacher))


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_lazy_modules() -> None:
    """Parameters and buffers that get their shape in the first forward (which may run plain)."""

    class Lazy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.LazyLinear(DIM)
            self.norm = nn.LazyBatchNorm1d()

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.norm(self.up(x)))

    compare(stack_of(Lazy), optimizer=None, ratio=None)


def test_state_survives_an_error_in_the_recompute() -> None:
    """Pitfall 45: when the recompute raises, the buffers are those of the forward."""

    class Failing(InPlaceCodebook):
        fail = False

        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if Failing.fail:
                raise RuntimeError("boom")
            return torch.sin(y)

    model = Stack(Failing, 2)
    with apply_partial_checkpoint(model):
        loss = model(batch(0)).sum()
        before = [b.clone() for b in model.buffers()]
        calls = [layer.calls for layer in model.layers]
        Failing.fail = True
        with pytest.raises(RuntimeError, match="boom"):
            loss.backward()
    assert_same([b.clone() for b in model.buffers()], before)
    assert [layer.calls for layer in model.layers] == calls


# --- sharing and repeated calls


def test_looped_blocks() -> None:
    """Report A4: blocks that are called several times per forward."""
    ours, _ = compare(lambda: Looped(MlpBlock, 2), every_n=2, steps=3)
    assert ours.executions["layers.0"] == 2 * 3 * 3


class SharedStack(Stack):
    """The same block object stands at two places."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        self.layers.append(self.layers[0])


def test_shared_block() -> None:
    """Report A4: a block listed twice is one block, called twice."""
    compare(SharedStack)


class SharedWeights(Stack):
    """Blocks of one stack share parameters with each other (not the block itself)."""

    def __init__(self) -> None:
        super().__init__(num_blocks=3)
        for layer in self.layers[1:]:
            layer.down.weight = self.layers[0].down.weight


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "bf16 autocast"])
def test_shared_weights(autocast: bool) -> None:
    """Report A4, E3: tied weights across blocks, also under autocast's weight cache."""
    compare(SharedWeights, autocast_step if autocast else square_step)


@pytest.mark.parametrize(
    "factory", [Stack, lambda: Looped(MlpBlock, 2), SharedWeights], ids=["own", "looped", "tied"]
)
def test_gradient_hooks_fire_once(factory: Callable[[], nn.Module]) -> None:
    """Report A4: one call of a parameter's accumulation hook per step, as in plain training."""

    def step(model: nn.Module, index: int) -> list[str]:
        seen: list[str] = []
        hooks = [
            p.register_post_accumulate_grad_hook(lambda _, name=name: seen.append(name))
            for name, p in model.named_parameters()
        ]
        square_step(model, index)
        for hook in hooks:
            hook.remove()
        return sorted(seen)

    _, plain = compare(factory, step)
    assert len(plain.values[0]) == len(set(plain.values[0]))


# --- more than one forward, more than one backward


def siamese_step(model: nn.Module, index: int) -> Tensor:
    """Two views of different batch size, then one backward."""
    one = model(batch(index, rows=3))
    two = model(batch(50 + index, rows=5))
    loss = one.pow(2).mean() + (two.sin().mean() - one.mean()).pow(2)
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("block", [MlpBlock, BatchNormBlock, LateDrawBlock])
def test_two_forwards_before_one_backward(block: type[nn.Module]) -> None:
    """Report F4, pitfall 46: siamese nets; two graphs of one block are alive at once."""
    compare(stack_of(block), siamese_step)


def test_backwards_in_the_other_order() -> None:
    """Pitfall 50: two forwards, backward of the first one first, then of the second."""

    def step(model: nn.Module, index: int) -> tuple[Tensor, Tensor]:
        one = model(batch(index, rows=3)).pow(2).mean()
        two = model(batch(50 + index, rows=5)).pow(2).mean()
        one.backward()
        two.backward()
        return one.detach(), two.detach()

    compare(Stack, step)


def test_forward_whose_graph_is_dropped() -> None:
    """Pitfall 46: a forward whose result is thrown away disturbs nothing."""

    def step(model: nn.Module, index: int) -> Tensor:
        unused = model(batch(70 + index))
        del unused
        return square_step(model, index)

    compare(Stack, step, ratio=None)


def test_part_of_the_graph_is_unused() -> None:
    """Pitfall 46: backward through the first two blocks only."""

    class Tap(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for index, layer in enumerate(self.layers):
                x = layer(x)
                if index == 1:
                    tapped = self.head(x)
            return tapped

    compare(Tap, ratio=None)


def retain_step(model: nn.Module, index: int) -> Tensor:
    """The same graph is run backward twice."""
    loss = model(batch(index)).pow(2).mean()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss.detach()


def two_losses_step(model: nn.Module, index: int) -> Tensor:
    """Two losses of one forward, each with its own backward."""
    y = model(batch(index))
    y.pow(2).mean().backward(retain_graph=True)
    y.abs().sum().backward()
    return y.detach()


def inputs_step(model: nn.Module, index: int) -> Tensor:
    """Backward into some parameters first, then into others."""
    params = list(model.parameters())
    loss = model(batch(index)).pow(2).mean()
    loss.backward(inputs=params[:5], retain_graph=True)
    loss.backward(inputs=params[5:])
    return loss.detach()


def accumulation_step(model: nn.Module, index: int) -> Tensor:
    """Gradients of three micro-batches are summed."""
    losses = [model(batch(10 * index + k)).pow(2).mean() / 3 for k in range(1)]
    losses[0].backward()
    for k in range(1, 3):
        loss = model(batch(10 * index + k)).pow(2).mean() / 3
        loss.backward()
        losses.append(loss)
    return torch.stack([loss.detach() for loss in losses])


def saliency_step(model: nn.Module, index: int) -> Tensor:
    """`torch.autograd.grad` of an output by the input, then an ordinary backward."""
    x = batch(index).requires_grad_()
    y = model(x)
    (saliency,) = torch.autograd.grad(y[:, 0].sum(), x, retain_graph=True)
    y.pow(2).mean().backward()
    return saliency


def gradient_penalty_step(model: nn.Module, index: int) -> Tensor:
    """The norm of a gradient is part of the loss (second order)."""
    x = batch(index).requires_grad_()
    (g,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    loss = model(x).pow(2).mean() + (g.norm(dim=1) - 1).pow(2).mean()
    loss.backward()
    return g.detach()


def double_backward_step(model: nn.Module, index: int) -> Tensor:
    """Second order by the parameters: a Hessian-vector product beside the gradient."""
    params = list(model.parameters())
    loss = model(batch(index)).pow(2).mean()
    grads = torch.autograd.grad(loss, params, create_graph=True)
    sum((g * g).sum() for g in grads).backward()
    return torch.cat([g.detach().flatten() for g in grads])


def autograd_grad_step(model: nn.Module, index: int) -> tuple[Tensor, ...]:
    """Gradients by `torch.autograd.grad`, handed to the parameters by hand."""
    params = list(model.parameters())
    grads = torch.autograd.grad(model(batch(index)).pow(2).mean(), params)
    for p, g in zip(params, grads, strict=True):
        p.grad = g
    return tuple(g.clone() for g in grads)


MANY_BACKWARDS = [
    retain_step,
    two_losses_step,
    inputs_step,
    saliency_step,
    gradient_penalty_step,
    double_backward_step,
    autograd_grad_step,
]


@pytest.mark.parametrize("every_n", [1, 2])
@pytest.mark.parametrize("step", MANY_BACKWARDS, ids=lambda s: s.__name__)
def test_backward_in_every_form(step: Callable[[nn.Module, int], Any], every_n: int) -> None:
    """Report A5, F1, F2: several backwards, `inputs=`, autograd.grad, second order."""
    compare(Stack, step, every_n=every_n, ratio=None)


def test_gradient_accumulation() -> None:
    """Three micro-batches per step, with BatchNorm and dropout."""
    compare(stack_of(BatchNormBlock), accumulation_step)
    compare(Stack, accumulation_step)


def test_gradient_wanted_for_the_input_only() -> None:
    """Report F1: every parameter is frozen, the input asks for a gradient."""

    def frozen() -> nn.Module:
        return Stack().requires_grad_(False)

    def step(model: nn.Module, index: int) -> Tensor:
        x = batch(index).requires_grad_()
        model(x).pow(2).mean().backward()
        assert x.grad is not None
        return x.grad

    compare(frozen, step, optimizer=None)


def test_functional_call() -> None:
    """Parameters lent by `torch.func.functional_call` are lent to the recompute too."""

    def step(model: nn.Module) -> tuple[Tensor, ...]:
        params = {n: (p.detach() * 1.5).requires_grad_() for n, p in model.named_parameters()}
        result = torch.func.functional_call(model, params, (batch(0),))
        return torch.autograd.grad(result.pow(2).mean(), list(params.values()))

    model = Stack(lambda: MlpBlock(dropout=0.0))
    expected = step(model)
    with apply_partial_checkpoint(model):
        grads = step(model)
    assert_same(grads, expected)


def test_optimizer_step_between_forward_and_backward() -> None:
    """Plain autograd raises, since a saved weight was changed in place; so must ours."""

    def step(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one, two = model(batch(0)).pow(2).mean(), model(batch(1)).pow(2).mean()
        one.backward()
        optimizer.step()
        two.backward()

    model = Stack(lambda: MlpBlock(dropout=0.0))
    with pytest.raises(RuntimeError):
        step(model)
    with apply_partial_checkpoint(model), pytest.raises(RuntimeError):
        step(model)


@pytest.mark.parametrize("needed", [True, False], ids=["thawed", "frozen"])
def test_requires_grad_toggled_between_forward_and_backward(needed: bool) -> None:
    """Report F5: the recompute has the flags of the forward, the parameters keep theirs."""

    def step(model: nn.Module, index: int) -> Tensor:
        model.layers.requires_grad_(not needed)
        loss = model(batch(index)).pow(2).mean()
        model.layers.requires_grad_(needed)
        loss.backward()
        model.layers.requires_grad_(True)
        return loss.detach()

    compare(Stack, step, ratio=None)


# --- other people's blocks


def test_transformer_layers() -> None:
    """Encoder and decoder layers of torch: masks by keyword, flags, dropout, both stacks."""

    class Translator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Transformer(DIM, 2, 2, 2, 2 * DIM, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            padding = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
            mask = nn.Transformer.generate_square_subsequent_mask(5)
            return self.model(x, x.flip(0), tgt_mask=mask, src_key_padding_mask=padding)

    def step(model: nn.Module, index: int) -> Tensor:
        loss = model(batch(index, rows=10).reshape(2, 5, DIM)).pow(2).mean()
        loss.backward()
        return loss.detach()

    ours, _ = compare(Translator, step, every_n=1)
    assert len(ours.executions) == 4


def test_recurrent_blocks() -> None:
    """An LSTM per block, its state passed on as a tuple."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(DIM, DIM, 2, dropout=0.5, batch_first=True)

        def forward(self, x: Tensor, state: Any = None) -> tuple[Tensor, Any]:
            y, state = self.rnn(x[:, None], state)
            return x + y[:, 0], state

    class RecurrentStack(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x, state = self.stem(x), None
            for layer in self.layers:
                x, state = layer(x, state)
            return self.head(x)

    compare(lambda: RecurrentStack(Recurrent, 3))


# --- frozen parts


def frozen_stem() -> Stack:
    """A frozen embedding before trainable blocks."""
    model = Stack()
    model.stem.requires_grad_(False)
    return model


class LoraBlock(MlpBlock):
    """A frozen base with a trainable low-rank path."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.lora_a = nn.Linear(DIM, 2, bias=False)
        self.lora_b = nn.Linear(2, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.lora_b(self.lora_a(x))


def lora() -> Stack:
    """Frozen everything, adapters in each block."""
    model = Stack(LoraBlock, 3)
    model.stem.requires_grad_(False)
    model.head.requires_grad_(False)
    return model


def lora_every_second_block() -> Stack:
    """Adapters in block 1 and 3; blocks 0 (nothing to train) and 2 (a gradient passes) are bare."""
    model = lora()
    model.layers = nn.ModuleList(
        block.requires_grad_(False) for block in [MlpBlock(), LoraBlock(), MlpBlock(), LoraBlock()]
    )
    for block in (model.layers[1], model.layers[3]):
        block.lora_a.requires_grad_(True)
        block.lora_b.requires_grad_(True)
    return model


def frozen_first_half() -> Stack:
    """A frozen backbone below trainable blocks."""
    model = Stack()
    model.stem.requires_grad_(False)
    model.layers[:2].requires_grad_(False)
    return model


def test_frozen_embedding() -> None:
    """Report B1, pitfall 12: gradients exist in block 0."""
    ours, _ = compare(frozen_stem)
    assert ours.grads[0]["layers.0.up.weight"] is not None


def test_adapters_on_frozen_blocks() -> None:
    """Report A10, B1, pitfall 12: every adapter gets its gradient, frozen bases get none."""
    ours, _ = compare(lora)
    for name, grad in ours.grads[0].items():
        assert (grad is not None) == ("lora" in name), name


def test_frozen_block_between_adapters() -> None:
    """Report A10: a frozen block through which a gradient passes is recomputed, one before is not.

    Blocks of two classes, so the classes are named.
    """
    ours, plain = compare(lora_every_second_block, layers="layers.*", ratio=None)
    assert ours.executions["layers.0"] == plain.executions["layers.0"]
    assert ours.executions["layers.2"] == 2 * plain.executions["layers.2"]


def test_frozen_first_half() -> None:
    """Report A6, B2: frozen blocks run once, the others twice, with no warning."""
    ours, plain = compare(frozen_first_half, ratio=None)
    for index, ratio in enumerate((1, 1, 2, 2)):
        name = f"layers.{index}"
        assert ours.executions[name] == ratio * plain.executions[name]


def test_detached_part_and_no_grad_pass() -> None:
    """Report A6: part of the net is detached, and a no-grad pass happens within the step."""

    class Detached(Stack):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.layers[0](self.stem(x))
            x = self.layers[1](x).detach()
            return self.head(self.layers[3](self.layers[2](x)))

    ours, plain = compare(Detached, ratio=None)
    assert ours.executions["layers.0"] == plain.executions["layers.0"]
    assert ours.executions["layers.3"] == 2 * plain.executions["layers.3"]


def test_thawing_during_the_run() -> None:
    """Report F5: what needs a gradient is decided in each call."""

    def step(model: nn.Module, index: int) -> Tensor:
        model.stem.requires_grad_(False)
        model.layers.requires_grad_(False)
        if index >= 1:
            model.layers[2:].requires_grad_(True)
        if index >= 2:
            model.layers[:2].requires_grad_(True)
        return square_step(model, index)

    ours, plain = compare(
        Stack, step, ratio=None, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1)
    )
    assert ours.executions["layers.0"] == plain.executions["layers.0"] + 1
    assert ours.executions["layers.3"] == plain.executions["layers.3"] + 2


class Gan(nn.Module):
    """A generator and a discriminator, two stacks of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = Stack(BatchNormBlock, 2)
        self.critic = Stack(OldSpectralNormBlock, 2)


def gan_step(model: Gan, index: int) -> tuple[Tensor, Tensor]:
    """The critic's step with a detached fake, then the generator's with a frozen critic."""
    model.critic.requires_grad_(True)
    fake = model.generator(batch(index))
    critic = model.critic(fake.detach()).mean() - model.critic(batch(90 + index)).mean()
    critic.backward()
    model.critic.requires_grad_(False)
    generator = -model.critic(fake).mean()
    generator.backward()
    model.critic.requires_grad_(True)
    return critic.detach(), generator.detach()


def test_gan() -> None:
    """Report F3, F5: requires_grad toggles between forwards, fakes are detached."""
    compare(
        Gan,
        gan_step,
        layers=[BatchNormBlock, OldSpectralNormBlock],
        ratio=None,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
    )


# --- eval mode


class EvalBackbone(Stack):
    """A backbone that trains in eval mode, as Lightning leaves pretrained parts."""

    def train(self, mode: bool = True) -> EvalBackbone:
        super().train(mode)
        self.layers.eval()
        return self


@pytest.mark.parametrize("block", [MlpBlock, BatchNormBlock])
def test_blocks_in_eval_mode_are_recomputed(block: type[nn.Module]) -> None:
    """Report I5, pitfall 13: grad mode decides, not `training`."""
    compare(lambda: EvalBackbone(block, 3).train())


def test_mode_changed_between_forward_and_backward() -> None:
    """Report I5: `model.eval()` before backward does not change what the recompute does."""

    def step(model: nn.Module, index: int) -> Tensor:
        loss = model(batch(index)).pow(2).mean()
        model.eval()
        loss.backward()
        assert not any(m.training for m in model.modules())
        model.train()
        return loss.detach()

    compare(Stack, step)


# --- precision


def autocast_step(model: nn.Module, index: int) -> Tensor:
    """Forward under bf16 autocast, backward outside, as Lightning does."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(batch(index)).float().pow(2).mean()
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("every_n", [1, 2])
def test_bf16_autocast(every_n: int) -> None:
    """Report E2: same autocast state in the recompute."""
    compare(Stack, autocast_step, every_n=every_n)


def _autocast_state() -> tuple[Any, ...]:
    return (
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
    )


SEEN: list[tuple[Any, ...]] = []


class AskingBlock(MlpBlock):
    """Asks for the autocast state around and inside a nested context and a float32 island."""

    def forward(self, x: Tensor) -> Tensor:
        SEEN.append(_autocast_state())
        h = self.up(x)
        with torch.autocast("cpu", enabled=False):
            SEEN.append(_autocast_state())
            h = torch.tanh(self.down(h.float()))
        with torch.autocast("cpu", dtype=torch.float16, cache_enabled=False):
            SEEN.append(_autocast_state())
            h = self.up(h)
        SEEN.append(_autocast_state())
        return x + self.down(h).float()


@pytest.mark.parametrize("cache_enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_state_in_the_recompute(dtype: torch.dtype, cache_enabled: bool) -> None:
    """Report E2, E4: dtype, enabled and cache of all nested contexts are those of the forward."""

    def step(model: nn.Module, index: int) -> Tensor:
        SEEN.clear()
        with torch.autocast("cpu", dtype=dtype, cache_enabled=cache_enabled):
            loss = model(batch(index)).float().pow(2).mean()
        forward = set(SEEN)
        SEEN.clear()
        loss.backward()
        assert set(SEEN) <= forward
        return loss.detach()

    compare(stack_of(AskingBlock), step)


def test_outer_autocast_is_lost_by_nobody() -> None:
    """Report E4: nested autocast around the model, backward inside the outer context."""

    def step(model: nn.Module, index: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            with torch.autocast("cpu", enabled=False):
                loss = model(batch(index)).pow(2).mean()
            loss.backward()
        return loss.detach()

    compare(Stack, step)


class Recycling(Stack):
    """AlphaFold's loop: three passes, only the last one with gradients."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for index in range(3):
            with torch.set_grad_enabled(index == 2 and torch.is_grad_enabled()):
                y = super().forward(x + y.detach())
        return y


@pytest.mark.parametrize("frozen", [False, True], ids=["trainable", "frozen weights"])
def test_recycling_under_autocast(frozen: bool) -> None:
    """Report E1, pitfall 7: the no-grad passes fill the weight cache; also with frozen weights."""

    def factory() -> nn.Module:
        model = Recycling(LoraBlock if frozen else MlpBlock, 3)
        return model

    try:
        autocast_step(factory(), 0)
    except RuntimeError as error:  # torch 2.8: the cached weight of the no-grad pass has no graph
        pytest.skip(f"plain training fails with this torch: {error}")
    compare(factory, autocast_step, ratio=None)


class TiedEmbedding(nn.Module):
    """Token ids in, the embedding's weight as the output layer, used inside the blocks as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, DIM)
        self.layers = nn.ModuleList(MlpBlock() for _ in range(3))
        self.tied = nn.Linear(DIM, 11, bias=False)
        self.tied.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.tied(x)


def test_tied_embedding_under_autocast() -> None:
    """Report E3, pitfall 7: one weight in two places under the autocast cache."""

    def step(model: nn.Module, index: int) -> Tensor:
        ids = torch.arange(6).reshape(2, 3) + index
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(ids)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids.flatten())
        loss.backward()
        return loss.detach()

    compare(TiedEmbedding, step)


def test_bf16_parameters() -> None:
    """A model that is bfloat16 throughout ("bf16-true")."""

    def step(model: nn.Module, index: int) -> Tensor:
        loss = model(batch(index).bfloat16()).pow(2).mean()
        loss.backward()
        return loss.detach()

    compare(lambda: Stack().bfloat16(), step)


# --- routing


class NoisyMixture(nn.Module):
    """A noisy top-1 gate and a loop over the experts that got rows; returns its balance term."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, 4)
        self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.gate(x)
        scores = torch.softmax(logits + torch.randn_like(logits), -1)
        weight, choice = scores.max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (choice == index).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, torch.tanh(expert(x[rows])) * weight[rows, None])
        return x + out, scores.mean(0).pow(2).sum()


class MixtureStack(Stack):
    """Sums the balance terms that the blocks return."""

    def __init__(self) -> None:
        super().__init__(NoisyMixture, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
        x = self.stem(x)
        balance = []
        for layer in self.layers:
            x, term = layer(x)
            balance.append(term)
        return self.head(x), balance


def test_noisy_mixture_of_experts() -> None:
    """Report E5, C5: same routing in the recompute; the returned terms are counted once."""

    def step(model: nn.Module, index: int) -> tuple[Tensor, int]:
        y, balance = model(batch(index, rows=6))
        loss = y.pow(2).mean() + torch.stack(balance).sum()
        loss.backward()
        return loss.detach(), len(balance)

    ours, _ = compare(MixtureStack, step, layers=NoisyMixture)
    assert ours.values[0][1] == 3
