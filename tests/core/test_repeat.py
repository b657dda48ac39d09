"""A step that runs out of memory anywhere is, in the end, the step that did not."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import DIM, MlpBlock, Stack, assert_same, batch, generator_states, seed_all
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from oom_helpers import MESSAGE, Bomb, bits
from torch import Tensor, nn

from lightning_ckpt import Plan, apply_partial_checkpoint
from lightning_ckpt.core.apply import apply_plan_quietly
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.out_of_memory.repeat import Retry, repeat
from lightning_ckpt.core.out_of_memory.sums import GradientSums
from lightning_ckpt.core.out_of_memory.tighten import tightened
from lightning_ckpt.core.out_of_memory.undo import StateBefore

CPU = torch.device("cpu")
PARTS = 3  # micro-batches of a step


class Block(MlpBlock):
    """Dropout, batch statistics, a buffer in place, an attribute, and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)
        self.register_buffer("load", torch.zeros(3))
        self.calls = 0
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(self.calls)
        self.load[self.calls % 3] += x.detach().sum()
        return super().forward(self.norm(x))


class Trained:
    """A model, and steps of it that survive."""

    def __init__(self, model: nn.Module, bomb: Bomb, every_n: int = 4) -> None:
        self.model, self.bomb = model, bomb
        self.handle: Handle = apply_partial_checkpoint(model, every_n=every_n)
        self.num_tries = 0
        self.losses: list[Tensor] = []

    def follow(self, plan: Plan) -> None:
        self.handle.remove()
        self.handle = apply_plan_quietly(self.model, plan)

    def retry(self) -> Retry:
        return Retry(
            lambda error: isinstance(error, torch.OutOfMemoryError),
            lambda is_last: tightened(self.handle.plan, is_last=is_last),
            self.follow,
            CPU,
        )

    def step(self, index: int, is_bombed: bool) -> None:
        state = StateBefore(self.model, [index])
        sums = GradientSums(self.model.parameters())

        def run() -> Tensor:
            self.bomb.is_armed = is_bombed
            loss = self.model(batch(index)).pow(2).mean()
            sums.begin_backward()
            loss.backward()
            self.bomb.is_armed = False
            return loss.detach()

        loss, num_tries = repeat(run, state, sums, self.retry())
        self.losses.append(loss)
        self.num_tries += num_tries


def train(at: list[int], part: int = -1) -> tuple[Trained, Any]:
    """`PARTS` micro-batches, one of which runs out of memory at these operations."""
    seed_all(0)
    with Bomb(at) as bomb:
        trained = Trained(Stack(Block, 4), bomb)
        for index in range(PARTS):
            trained.step(index, index == part)
    grads = {name: p.grad for name, p in trained.model.named_parameters()}
    seen = [(layer.calls, layer.seen) for layer in trained.model.layers]
    state = trained.model.state_dict()
    return trained, bits([grads, state, trained.losses, seen, generator_states()])


@pytest.fixture(autouse=True)
def quick_collection() -> Iterator[None]:
    """At each failure garbage is collected: look only at what is new, not at all of torch. (In
    torch 2.8 a forward that failed leaves a checkpoint's hooks until its frames are collected.)"""
    gc.freeze()
    yield
    gc.collect()
    gc.unfreeze()


@functools.cache
def plain() -> tuple[Any, int]:
    """What is left behind, and how many operations a micro-batch has."""
    trained, left = train([10**9], 1)
    return left, trained.bomb.count


@pytest.mark.parametrize("part", range(PARTS))
def test_all_over_each_micro_batch(part: int) -> None:
    expected, num_operations = plain()
    for at in range(1 + part, num_operations + 1, 7):
        trained, ours = train([at], part)
        assert trained.num_tries == trained.bomb.hits == 1
        assert_same(ours, expected, f"operation {at}")


@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    part=st.integers(0, PARTS - 1),
    at=st.lists(st.integers(1, 400), min_size=2, max_size=2, unique=True),
)
@example(part=1, at=[140, 300])
def test_several_failures_of_one_batch(part: int, at: list[int]) -> None:
    trained, ours = train(sorted(at), part)
    assert trained.num_tries == trained.bomb.hits
    assert_same(ours, plain()[0])


def test_the_plan_is_tightened_step_by_step() -> None:
    trained, _ = train([5], 0)
    assert [block.action for block in trained.handle.plan] == [*["recompute"] * 3, "keep"]
    trained, _ = train([5, 10], 0)
    assert trained.handle.plan.num_recomputed == 4


def test_the_third_repeat_recomputes_all() -> None:
    """A plan of many blocks would be halved more often."""
    seed_all(0)
    with Bomb([1, 2, 3]) as bomb:
        trained = Trained(Stack(MlpBlock, 32), bomb, every_n=100)
        trained.step(0, True)
    assert trained.num_tries == 3
    assert trained.handle.plan.num_recomputed == 32


def test_given_up_with_the_error_itself() -> None:
    errors: list[Exception] = []

    class Error(torch.OutOfMemoryError):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            errors.append(self)

    with Bomb([1, 2, 3, 4, 5], Error) as bomb:
        trained = Trained(Stack(Block, 4), bomb)
        with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory") as caught:
            trained.step(0, True)
    assert caught.value is errors[-1]
    assert len(errors) == 3, "2 blocks more, then the last; then there is none"
    assert any("__torch_dispatch__" in entry.name for entry in caught.traceback)
    notes = " ".join(caught.value.__notes__)
    assert "tightest" in notes
    assert "after 2 repeats" in notes
    assert "offload=True" in notes


def test_other_errors_pass() -> None:
    with Bomb([20], ValueError) as bomb:
        trained = Trained(Stack(Block, 4), bomb)
        before = trained.handle
        with pytest.raises(ValueError, match="out of memory") as caught:
            trained.step(0, True)
    assert trained.handle is before
    assert not hasattr(caught.value, "__notes__")


@pytest.mark.parametrize("at", [60, *range(100, 230, 6)])
def test_nothing_of_the_failed_try_is_alive_in_the_next(at: int) -> None:
    """An error's traceback holds the frames, and they the graph; so does autograd's queue."""
    alive: list[Any] = []
    counts = []

    class Watched(Block):
        def forward(self, x: Tensor) -> Tensor:
            hidden = x * 2
            alive.append(weakref.ref(hidden))
            return super().forward(hidden)

    with Bomb([at]) as bomb:
        trained = Trained(Stack(Watched, 4), bomb)
        follow = trained.follow

        def look(plan: Plan) -> None:
            counts.append(sum(ref() is not None for ref in alive))
            follow(plan)

        trained.follow = look  # type: ignore[method-assign]
        trained.step(0, True)
    assert len(alive) >= 4
    assert counts == [0]


# --- gradients


def learn(
    weights: list[nn.Parameter], backward: Any, zero: Any = None, fails_at: int | None = None
) -> list[Tensor | None]:
    """A step on plain parameters; `backward` is given a `fail` to call somewhere."""
    sums = GradientSums(weights)
    tries = []

    def fail(*_: Any) -> None:
        if len(tries) == 1 and fails_at is not None:
            raise torch.OutOfMemoryError(MESSAGE)

    def run() -> None:
        tries.append(1)
        if zero is not None:
            zero()
        sums.begin_backward()
        backward(fail)

    plan = Plan(())
    retry = Retry(
        lambda e: isinstance(e, torch.OutOfMemoryError), lambda last: plan, lambda p: None, CPU
    )
    repeat(run, StateBefore(nn.ParameterList(weights)), sums, retry)
    return [weight.grad for weight in weights]


class _FailInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, fail: Any) -> Tensor:
        ctx.fail = fail
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.fail()
        return grad, None


def two(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """Backward comes to the second one first, and fails then."""
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(4, dtype=dtype)) for _ in range(2)]


def chain(weights: list[nn.Parameter], scale: Any, fail: Any) -> None:
    inner = _FailInBackward.apply(weights[0] * scale, fail)
    (inner * 3 + weights[1] * scale).abs().sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.float64])
def test_a_sum_gets_its_part_once(dtype: torch.dtype) -> None:
    results = []
    for fails_at in (None, 0):
        weights = two(dtype)
        for scale in (0.3, 0.7, -0.0):
            learn(weights, functools.partial(chain, weights, scale), fails_at=fails_at)
        results.append(bits([w.grad for w in weights]))
    assert_same(*results)


def test_minus_zero_stays_minus_zero() -> None:
    results = []
    for fails_at in (None, 0):
        weights = two()
        for weight in weights:
            weight.grad = torch.full_like(weight, -0.0)
        learn(weights, functools.partial(chain, weights, -0.0), fails_at=fails_at)
        assert all(torch.signbit(w.grad).all() for w in weights)  # type: ignore[arg-type]
        results.append(bits([w.grad for w in weights]))
    assert_same(*results)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_zeroed_in_each_try(to_none: bool) -> None:
    """Of one parameter only: what no optimizer zeroes grows on."""
    results = []
    for fails_at in (None, 0):
        weights = two()
        optimizer = torch.optim.SGD(weights[1:], lr=1.0)
        zero = functools.partial(optimizer.zero_grad, set_to_none=to_none)
        for scale in (0.3, 0.7, 0.9):
            learn(weights, functools.partial(chain, weights, scale), zero, fails_at=fails_at)
        results.append(bits([w.grad for w in weights]))
    assert_same(*results)


def refused(weights: list[nn.Parameter], backward: Any) -> str:
    with pytest.raises(torch.OutOfMemoryError) as caught:
        learn(weights, backward, fails_at=0)
    assert all(not weight._backward_hooks for weight in weights)
    return " ".join(caught.value.__notes__)


def test_two_backward_calls_that_both_came_through_are_refused() -> None:
    weights = two()

    def backward(fail: Any) -> None:
        for _ in range(2):
            (weights[1] * 2).sum().backward()
        fail()

    learn(weights, backward)
    assert "changed more than once" in refused(weights, backward)


def test_two_backward_calls_with_a_failure_between_are_refused() -> None:
    """After the first the sum has moved once, as after a whole one: the next try finds out."""
    weights = two()

    def backward(fail: Any) -> None:
        (weights[1] * 2).sum().backward()
        fail()
        (weights[1] * 3).sum().backward()

    learn(weights, backward)
    assert "several parts" in refused(weights, backward)


def test_a_part_that_does_not_come_again_is_refused() -> None:
    weights = two()
    calls = []

    def backward(fail: Any) -> None:
        calls.append(1)
        if len(calls) != 3:  # 1: makes the sums, 2: fails, 3: is another step
            (weights[1] * 2).sum().backward()
        fail()
        (weights[0] * 2).sum().backward()

    learn(weights, backward)
    assert "several parts" in refused(weights, backward)


def test_two_backward_calls_without_sums_are_repeated() -> None:
    results = []
    for fails_at in (None, 0):
        weights = two()

        def backward(fail: Any, weights: list[nn.Parameter] = weights) -> None:
            (weights[1] * 2).sum().backward()
            fail()
            (weights[1] * 3).sum().backward()

        results.append(bits(learn(weights, backward, fails_at=fails_at)[1]))
    assert_same(*results)


def test_sparse_sums_are_refused() -> None:
    table = nn.Parameter(torch.randn(5, 2))

    def backward(fail: Any) -> None:
        nn.functional.embedding(torch.tensor([1, 3]), table, sparse=True).sum().backward()
        fail()

    learn([table], backward)
    assert "the gradient" in refused([table], backward)


def test_a_parameter_that_moved_in_backward_is_refused() -> None:
    """An optimizer that steps in backward has moved."""
    weights = two()

    def step(weight: Tensor) -> None:
        with torch.no_grad():
            weight.sub_(weight.grad)  # type: ignore[arg-type]

    weights[1].register_post_accumulate_grad_hook(step)
    assert "parameter '1' was changed" in refused(weights, functools.partial(chain, weights, 0.5))


@contextmanager
def user_hook(weight: nn.Parameter) -> Iterator[list[int]]:
    calls: list[int] = []
    handle = weight.register_hook(lambda grad: calls.append(1) or grad * 2)
    yield calls
    handle.remove()


def test_hooks_of_the_user_count_once_in_the_sum() -> None:
    results = []
    for fails_at in (None, 0):
        weights = two()
        with user_hook(weights[1]):
            for scale in (0.3, 0.7):
                learn(weights, functools.partial(chain, weights, scale), fails_at=fails_at)
        results.append(bits([w.grad for w in weights]))
    assert_same(*results)
