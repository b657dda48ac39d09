"""The check that users run: what it finds, where, and that it leaves no trace."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers import DIM, MlpBlock, Stack, assert_same, batch, generator_states, stack_of
from torch import Tensor, nn

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core.report import Report
from lightning_ckpt.core.verify import verify

NUM_BLOCKS = 3


class Holder:
    """Hides what it holds from the replay, which does not look into objects."""

    def __init__(self, **content: Any) -> None:
        vars(self).update(content)


# --- kinds that are replayed: nothing to find


class PrivateTorch(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.stream = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(DIM, generator=self.stream)


class PrivateNumpy(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.stream = np.random.default_rng(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.tensor(self.stream.random(), dtype=x.dtype))


class Norm(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return super().forward(self.norm(x))


@pytest.mark.parametrize("block", [MlpBlock, PrivateTorch, PrivateNumpy, Norm])
@pytest.mark.parametrize("every_n", [1, 2])
def test_what_is_replayed_is_equal(block: Callable[[], nn.Module], every_n: int) -> None:
    report = verify(Stack(block, NUM_BLOCKS), batch(0), every_n=every_n)
    assert report.ok, report.differences
    assert list(report.recomputes.values()) == [int(i % every_n == 0) for i in range(NUM_BLOCKS)]
    assert report.compared["gradient"] == len(list(Stack(block, NUM_BLOCKS).parameters()))


def test_bytes() -> None:
    """A long batch, so that activations outweigh the gradients."""
    report = verify(Stack(num_blocks=8), batch(0, rows=512))
    assert report.plain_peak_bytes is not None
    assert report.checkpointed_peak_bytes is not None
    assert report.checkpointed_peak_bytes < 0.6 * report.plain_peak_bytes


# --- kinds that it finds: only block 1 has the fault


class HiddenTorch(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Holder(stream=torch.Generator().manual_seed(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * torch.rand(DIM, generator=self.noise.stream)


class HiddenNumpy(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Holder(stream=np.random.default_rng(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.tensor(self.noise.stream.random(), dtype=x.dtype))


class HiddenPython(MlpBlock):
    def __init__(self) -> None:
        super().__init__()
        self.noise = Holder(stream=random.Random(3))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.tensor(self.noise.stream.random(), dtype=x.dtype))


class HiddenCache(MlpBlock):
    """Each call attends to all calls before."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = Holder(states=[])

    def forward(self, x: Tensor) -> Tensor:
        self.cache.states.append(x.detach())
        return super().forward(x) * sum(state.mean() for state in self.cache.states)


class HiddenBranch(MlpBlock):
    """Control flow on a value that is another one in the recompute: other tensors are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.loads = Holder(mean=torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.loads.mean = self.loads.mean + 1
        return super().forward(x) if self.loads.mean.item() == 1 else x * self.up.bias[:DIM]


class HiddenCounter(MlpBlock):
    """The loss and the gradients are right, and it counts twice."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = Holder(number=0)

    def forward(self, x: Tensor) -> Tensor:
        self.calls.number += 1
        return super().forward(x)


class Fault(NamedTuple):
    """A block, and a difference that it must give."""

    block: Callable[[], nn.Module]
    what: str
    name: str


FAULTS = [
    Fault(HiddenTorch, "gradient", "layers.1.down.weight"),
    Fault(HiddenTorch, "generator", "layers.1.noise.stream"),
    Fault(HiddenNumpy, "gradient", "layers.1.down.weight"),
    Fault(HiddenNumpy, "generator", "layers.1.noise.stream"),
    Fault(HiddenPython, "generator", "layers.1.noise.stream"),
    Fault(HiddenCache, "gradient", "layers.0.up.weight"),
    Fault(HiddenCache, "state", "layers.1.cache.states[1]"),
    Fault(HiddenBranch, "error", "CheckpointError"),
    Fault(HiddenCounter, "state", "layers.1.calls.number"),
]


def with_fault(block: Callable[[], nn.Module]) -> Stack:
    """Good blocks around a bad one."""
    torch.manual_seed(0)
    model = Stack(MlpBlock, NUM_BLOCKS)
    model.layers[1] = block()
    return model


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f"{f.block.__name__}: {f.what}")
def test_faults_are_found_and_placed(fault: Fault) -> None:
    model = with_fault(fault.block)
    report = verify(model, batch(0), layers=lambda name, part: part in [*model.layers])
    found = {(d.what, d.name): d for d in report.differences}
    assert (fault.what, fault.name) in found, found.keys()
    assert all(d.blocks == ("layers.1",) and not d.in_plain_too for d in report.differences)
    # Blocks behind it have their gradients as in plain training.
    assert not any(d.name.startswith(("layers.2", "head")) for d in report.differences)
    assert not report.ok


class CountingBuffer(MlpBlock):
    """Changes a buffer in place: wrong in a graph that is compiled and checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)  # type: ignore[operator, union-attr]
        return super().forward(x * self.calls)


@pytest.mark.filterwarnings("ignore:CountingBuffer is compiled and checkpointed")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_known_limit_of_compiled_code_is_found() -> None:
    """Its recomputes cannot be counted, and its block is named all the same."""
    model = with_fault(CountingBuffer)
    assert verify(model, batch(0), layers="layers.*").ok
    model.layers[1].compile(backend="aot_eager")
    report = verify(model, batch(0), layers="layers.*")
    assert {d.blocks for d in report.differences} == {("layers.1",)}
    assert report.recomputes["layers.1"] == 0
    assert report.plain_peak_bytes is None


def test_two_faults_are_both_named() -> None:
    """The earlier block's gradients are wrong because of either."""
    model = with_fault(HiddenTorch)
    model.layers[2] = HiddenNumpy()
    report = verify(model, batch(0), layers=lambda name, part: part in [*model.layers])
    found = {d.name: d.blocks for d in report.differences}
    assert found["layers.2.up.weight"] == ("layers.2",)
    assert found["stem.weight"] == ("layers.1", "layers.2")


# --- what plain training does not have alike either

_calls = itertools.count(1)


class NoisyForward(MlpBlock):
    """A kernel that is not deterministic; so is state in a global."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + next(_calls) / 8)


class _NoisyBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * (1 + next(_calls) / 8)


class NoisyBackward(MlpBlock):
    """As atomic additions on a GPU: the forward is the same each time."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_NoisyBackward.apply(x))


class NoisyWeight(MlpBlock):
    """Only the gradient of a weight is noisy."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * _NoisyBackward.apply(self.up.bias[:DIM])


@torch.library.custom_op("lightning_ckpt_tests::noisy", mutates_args=())
def noisy_op(x: Tensor) -> Tensor:
    return x * (1 + next(_calls) / 8)


noisy_op.register_autograd(lambda ctx, grad: grad)


class NoisyOp(MlpBlock):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(noisy_op(x))


class GlobalNumpy(MlpBlock):
    """A generator of the module's file."""

    stream = np.random.default_rng(5)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * torch.tensor(self.stream.random(), dtype=x.dtype))


@pytest.mark.parametrize("block", [NoisyForward, NoisyOp, GlobalNumpy, NoisyBackward, NoisyWeight])
def test_noise_is_told_from_checkpointing(block: Callable[[], nn.Module]) -> None:
    model = with_fault(block)
    report = verify(model, batch(0), layers=lambda name, part: part in [*model.layers])
    assert not report.ok
    assert all(d.in_plain_too for d in report.differences)
    assert {d.blocks for d in report.differences} == {("layers.1",)}


def test_noise_of_a_kept_block() -> None:
    """Block 1 is not checkpointed with every_n=2, and named all the same."""
    model = with_fault(NoisyForward)
    report = verify(model, batch(0), every_n=2, layers="layers.*")
    assert {d.blocks for d in report.differences} == {("layers.1",)}
    assert all(d.in_plain_too for d in report.differences)


def test_noise_outside_of_the_blocks() -> None:
    model = Stack(MlpBlock, NUM_BLOCKS)
    model.stem = NoisyForward()
    report = verify(model, batch(0), layers="layers.*")
    assert {d.blocks for d in report.differences} == {()}
    assert all(d.in_plain_too for d in report.differences)


# --- it leaves everything as it was


class Restless(MlpBlock):
    """Changes all that a forward can change."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.frozen = nn.Parameter(torch.ones(DIM), requires_grad=False)
        self.calls = 0
        self.history: list[Any] = []
        self.holder = Holder(states=[])
        self.stream = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(x.detach())
        self.holder.states.append(self.calls)
        self.frozen.data.mul_(0.5)
        self.latest = x.detach()
        self.dropout.train(self.calls % 2 == 0)
        noise = torch.rand(DIM, generator=self.stream) * random.random() * np.random.random()
        return super().forward(self.norm(x)) * noise * self.frozen


def everything(model: nn.Module) -> dict[str, Any]:
    return {
        "state": {k: v.clone() for k, v in model.state_dict().items()},
        "grads": {n: None if p.grad is None else p.grad.clone() for n, p in named(model)},
        "flags": {n: p.requires_grad for n, p in named(model)},
        "modes": [m.training for m in model.modules()],
        "types": [type(m) for m in model.modules()],
        "calls": [(m.calls, list(m.history), list(m.holder.states)) for m in model.layers],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "streams": [m.stream.get_state() for m in model.layers],
        "generators": generator_states(),
    }


def named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_behind(fails: bool) -> None:
    """Also when the plain step raises."""
    model = Stack(Restless, NUM_BLOCKS)
    model(batch(1)).sum().backward()  # gradients that wait to be accumulated
    model.layers[1].eval()
    model.head.weight.requires_grad_(False)
    before = everything(model)
    given = batch(0)

    def loss(module: nn.Module, x: Tensor) -> Tensor:
        x.add_(1)
        result = module(x).pow(2).mean()
        if fails:
            raise RuntimeError("no loss today")
        return result

    if fails:
        with pytest.raises(RuntimeError, match="no loss today"):
            verify(model, given, loss=loss)
    else:
        verify(model, given, loss=loss)
    assert_same(everything(model), before)
    assert torch.equal(given, batch(0))


def test_hooks_that_wait_for_gradients_are_not_woken() -> None:
    """An optimizer that steps in backward would step here."""
    model = Stack()
    woken = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(woken.append)
    verify(model, batch(0))
    assert woken == []


def test_under_autocast() -> None:
    """The casts of weights that it caches are of one step."""
    with torch.autocast("cpu", torch.bfloat16):
        report = verify(Stack(), batch(0))
    assert report.ok, report.differences


def test_casts_of_weights_do_not_outlive_it() -> None:
    """Inside an autocast, which keeps them: neither those of before come in, nor do ours go on."""
    model, x = Stack().eval(), batch(0)  # no dropout

    with torch.no_grad():
        weights = [p.clone() for p in model.parameters()]

    def loss(factor: int) -> Tensor:
        with torch.no_grad():
            for parameter, weight in zip(model.parameters(), weights, strict=True):
                parameter.copy_(factor * weight)
        return model(x).float().pow(2).mean()

    expected = []
    for factor in (1, 2):
        with torch.autocast("cpu", torch.bfloat16):
            expected.append(loss(factor))
    with torch.autocast("cpu", torch.bfloat16):
        loss(3)
        assert not torch.equal(loss(2), expected[1])  # what autocast does by itself
        report = verify(model, x)
        assert report.ok, report.differences
        assert torch.equal(loss(1), expected[0])


# --- what it can be given


class Named(Stack):
    def forward(self, x: Tensor, scale: float = 1.0) -> Any:  # type: ignore[override]
        return {"logits": super().forward(x) * scale, "loss": super().forward(x).abs().mean()}


class Pair(Stack):
    def forward(self, x: Tensor, y: Tensor) -> Any:  # type: ignore[override]
        return super().forward(x), [super().forward(y)]


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (Stack, batch(0)),
        (Named, {"x": batch(0), "scale": 2.0}),
        (Pair, (batch(0), batch(1))),
        (Pair, [batch(0), batch(1)]),
    ],
)
def test_batches_and_outputs(model: Callable[[], nn.Module], given: Any) -> None:
    assert verify(model(), given).ok


def test_the_models_own_loss_is_taken() -> None:
    """The mean square of the logits would give another gradient to `head.bias`."""
    model = Named()
    taken: list[Tensor] = []
    model.head.bias.register_hook(taken.append)
    torch.manual_seed(0)
    verify(model, {"x": batch(0)})
    torch.manual_seed(0)
    model(batch(0))["loss"].backward()
    assert torch.equal(taken[0], taken[-1])


def test_transformers_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).train()
    ids = torch.arange(16).view(2, 8)
    report = verify(model, {"input_ids": ids, "labels": ids})
    assert report.ok, report.differences
    assert sum(report.recomputes.values()) == 2


# --- what it refuses


def report_of(model: nn.Module, given: Any, **words: Any) -> Report:
    return verify(model, given, **words)


def test_a_plan_in_force_is_refused() -> None:
    model = Stack()
    with (
        apply_partial_checkpoint(model),
        pytest.raises(ValueError, match=r"module: 'layers\.0' is checkpointed by a plan in force"),
    ):
        verify(model, batch(0))


def test_parameters_that_are_not_made_are_refused() -> None:
    model = Stack(lambda: nn.Sequential(nn.LazyLinear(DIM), nn.Linear(DIM, DIM)))
    with pytest.raises(ValueError, match=r"'layers\.0\.0\.weight' is not made yet; run a batch"):
        verify(model, batch(0), layers="layers.*")


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda m, x: m(x),
            "must be a tensor of one element that needs a gradient, got a tensor of shape ",
        ),
        (
            lambda m, x: m(x).mean().detach(),
            r"got a tensor of shape \(\) that needs none; pass loss=",
        ),
        (lambda m, x: None, "that needs a gradient, got None; pass loss=lambda module, batch"),
    ],
)
def test_losses_that_are_none(loss: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        verify(Stack(), batch(0), loss=loss)


@pytest.mark.parametrize("loss", [3, nn.MSELoss()], ids=repr)
def test_a_loss_that_is_no_function(loss: Any) -> None:
    """A criterion would get the module in place of a prediction."""
    with pytest.raises(TypeError, match=r"^loss must be a function, got .*; pass loss=lambda"):
        verify(Stack(), batch(0), loss=loss)


def test_output_without_a_gradient() -> None:
    model = Stack().requires_grad_(False)
    with pytest.raises(ValueError, match="output of Stack, a Tensor, has no tensor that needs"):
        verify(model, batch(0))


def test_no_blocks() -> None:
    with pytest.raises(ValueError, match="no repeated blocks found in Linear"):
        verify(nn.Linear(DIM, DIM), batch(0))


def test_stack_of_is_what_it_says() -> None:
    """The toy of these tests has its blocks where they are expected."""
    assert list(verify(stack_of(MlpBlock)(), batch(0)).recomputes) == [
        f"layers.{index}" for index in range(NUM_BLOCKS)
    ]
