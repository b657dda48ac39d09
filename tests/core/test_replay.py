"""State and surroundings of a block, in the habits that other people's models have.

Each of these once gave silently wrong gradients, changed state twice, or crashed.
"""

from __future__ import annotations

import contextvars
import gc
import random
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers import DIM, MlpBlock, Stack, adam, batch, compare, square_step, stack_of
from torch import Tensor, nn

from lightning_ckpt import apply_partial_checkpoint, is_recomputing


class Base(nn.Module):
    """Activations that must be computed again, at the scale of some state."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.norm = nn.LayerNorm(DIM)
        self.down = nn.Linear(DIM, DIM)

    def mix(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return x + torch.sin(self.down(torch.tanh(self.up(self.norm(x))) * scale))

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


class Calling(Stack):
    """A stack that calls its blocks in a way of its own."""

    def __init__(self, block: Any, call: Any) -> None:
        super().__init__(block, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for index, layer in enumerate(self.layers):
            x = self.call(layer, x, index)
        return self.head(x)


def calling(block: Any, call: Any) -> Any:
    return lambda: Calling(block, call)


# --- attributes


class Scaled(Base):
    """Reads a tensor that somebody else puts there."""

    scale: Any = None

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, self.scale)


def test_tensor_attribute_rebound_by_the_caller_afterwards() -> None:
    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        layer.scale = torch.full((DIM,), 0.5 + index)
        x = layer(x)
        layer.scale = torch.zeros(DIM)
        return x

    compare(calling(Scaled, call))


def test_small_buffer_changed_in_place_by_the_caller_afterwards() -> None:
    class Shifted(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.ones(DIM))

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x + self.shift)  # plain autograd does not save it

    def call(layer: nn.Module, x: Tensor, index: int) -> Tensor:
        x = layer(x)
        layer.shift.add_(0.25)
        return x

    compare(calling(Shifted, call))


def test_large_state_changed_in_place_by_the_caller_is_an_error() -> None:
    class Large(Base):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.ones(40_000))

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x + self.table[:DIM])

    model = Stack(Large, 2)
    with apply_partial_checkpoint(model):
        loss = model(batch(0)).sum()
        model.layers[0].table.add_(1)
        with pytest.raises(RuntimeError, match="'table' of a checkpointed Large was modified"):
            loss.backward()


def test_recurrent_state_with_a_graph() -> None:
    class Recurrent(Base):
        def __init__(self) -> None:
            super().__init__()
            self.state: Any = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.mix(x if self.state is None else x + self.state)
            self.state = torch.tanh(y)
            return y

    def step(model: nn.Module, index: int) -> Tensor:
        for layer in model.layers:
            layer.state = None
        x = model.stem(batch(index))
        for _ in range(3):
            for layer in model.layers:
                x = layer(x)
        loss = x.pow(2).mean()
        loss.backward()
        return loss.detach()

    compare(stack_of(Recurrent), step, optimizer=None)


def test_state_that_is_detached_in_the_next_step() -> None:
    class Carrying(Base):
        def __init__(self) -> None:
            super().__init__()
            self.last: Any = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.mix(x if self.last is None else x + self.last.detach())
            self.last = y
            return y

    compare(stack_of(Carrying))


def test_graphs_without_backward_do_not_hang_on_each_other() -> None:
    class Stashing(Base):
        def __init__(self) -> None:
            super().__init__()
            self.taps: list[Tensor] = []
            self.last: Any = None
            self.out: Any = None

        def forward(self, x: Tensor) -> Tensor:
            y = self.mix(x)
            self.taps, self.last, self.out = [y], y, SimpleNamespace(y=y)
            return y

    model = Stack(Stashing, 2)
    alive = []
    with apply_partial_checkpoint(model):
        for index in range(6):
            model(batch(index))
            token = torch.nn.Identity()  # lives as long as the graph that holds the hook
            model.layers[0].last.register_hook(lambda grad, token=token: None)
            alive.append(weakref.ref(token))
            del token
    gc.collect()
    assert sum(ref() is not None for ref in alive) == 1, "only what the block itself holds"


@pytest.mark.parametrize(
    ("start", "change"),
    [
        ((1.0,), lambda s: (s[0] + 1,)),
        (np.float64(1.0), lambda s: s + 1),
        (frozenset({1}), lambda s: s | {len(s) + 1}),
        (SimpleNamespace(n=1), lambda s: SimpleNamespace(n=s.n + 1)),
        (np.ones(1), lambda s: np.add(s, 1, out=s)),
        ([torch.ones(1)], lambda s: [s[0].add_(1)]),
        ({"a": {"n": 1}}, lambda s: s["a"].update(n=s["a"]["n"] + 1) or s),
    ],
    ids=["tuple", "numpy scalar", "frozenset", "namespace", "array", "tensor in a list", "nested"],
)
def test_attribute_that_the_forward_changes(start: Any, change: Any) -> None:
    def number(state: Any) -> float:
        if isinstance(state, SimpleNamespace):
            return state.n
        if isinstance(state, dict):
            return state["a"]["n"]
        if isinstance(state, frozenset):
            return len(state)
        return float(state[0] if hasattr(state, "__len__") else state)

    class Counting(Base):
        def __init__(self) -> None:
            super().__init__()
            import copy

            self.state = copy.deepcopy(start)

        def forward(self, x: Tensor) -> Tensor:
            y = self.mix(x, 1.0 / number(self.state))
            self.state = change(self.state)
            return y

    def step(model: nn.Module, index: int) -> Any:
        return square_step(model, index), [number(layer.state) for layer in model.layers]

    compare(stack_of(Counting), step)


def test_one_buffer_in_two_modules() -> None:
    class Holder(nn.Module):
        def __init__(self, shared: Tensor) -> None:
            super().__init__()
            self.register_buffer("shared", shared)

    class Two(Base):
        def __init__(self) -> None:
            super().__init__()
            shared = torch.ones(DIM)
            self.one, self.two = Holder(shared), Holder(shared)

        def forward(self, x: Tensor) -> Tensor:
            self.one.shared.mul_(0.9)
            return self.mix(x, self.two.shared.clone())

    compare(stack_of(Two))


def test_modules_and_parameters_made_in_the_first_forward() -> None:
    class Growing(Base):
        def forward(self, x: Tensor) -> Tensor:
            if not hasattr(self, "extra"):
                self.extra = nn.Linear(DIM, DIM)
                self.gain = nn.Parameter(torch.ones(DIM))
            return self.mix(nn.functional.dropout(self.extra(x), 0.2) * self.gain)

    compare(stack_of(Growing), optimizer=None)


def test_frozen_parameter_that_starts_to_move_late() -> None:
    class Late(Base):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Parameter(torch.ones(DIM), requires_grad=False)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 2:
                self.teacher.data = self.teacher.data * 0.9
            return self.mix(x, self.teacher)

    compare(stack_of(Late), steps=5)


class Engine:
    """A sharding engine in small, as ZeRO-3 works: its hooks on each leaf fill the parameters,
    which it knows by a mark of its own, and empty them again.

    Args:
        is_full: whether the parameters are full before the first step, and before each other step.
        keeps: whether they stay full after a use, as small ones do.
    """

    def __init__(self, is_full: bool, keeps: bool) -> None:
        self.is_full, self.keeps = is_full, keeps
        self.known: list[Any] = []

    def take(self, model: nn.Module) -> nn.Module:
        for module in model.modules():
            if next(module.parameters(recurse=False), None) is not None:
                for parameter in module.parameters(recurse=False):
                    parameter.full = parameter.data
                    self.known.append(parameter)
                module.register_forward_pre_hook(self._fill)
                module.register_forward_hook(self._empty)
        return model

    def between_steps(self) -> None:
        for parameter in self.known:
            parameter.data = parameter.full if self.is_full else parameter.full.new_empty(0)

    def gather(self) -> None:
        for parameter in self.known:
            parameter.data = parameter.full

    def _fill(self, module: nn.Module, args: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.full  # an AttributeError if it is not the engine's

    def _empty(self, module: nn.Module, args: Any, result: Any) -> None:
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.full if self.keeps else parameter.full.new_empty(0)


@pytest.mark.parametrize("keeps", [False, True], ids=["emptied after use", "kept after use"])
@pytest.mark.parametrize("is_full", [False, True], ids=["empty at first", "prefetched"])
def test_frozen_parameters_of_a_sharding_engine(is_full: bool, keeps: bool) -> None:
    """Report A10, pitfall 23: they are the engine's own in the recompute, not copies."""
    engines: dict[int, Engine] = {}

    def make() -> nn.Module:
        model = Stack(MlpBlock, 3)
        for layer in model.layers:
            layer.up.requires_grad_(False)
        engine = Engine(is_full, keeps)
        engines[id(model)] = engine
        return engine.take(model)

    def step(model: nn.Module, index: int) -> list[Tensor]:
        engine = engines[id(model)]
        engine.between_steps()
        loss = model(batch(index)).pow(2).mean()
        grads = torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad])
        engine.gather()
        return [loss.detach(), *grads]

    compare(make, step, steps=7, optimizer=None)


# --- arguments


def test_generators_given_as_arguments() -> None:
    class Drawing(Base):
        def forward(self, x: Tensor, ours: torch.Generator, theirs: list[Any]) -> Tensor:
            scale = torch.rand(1, generator=ours) + theirs[0].random() + theirs[1].random()
            return self.mix(x, scale)

    def step(model: nn.Module, index: int) -> Any:
        ours = torch.Generator().manual_seed(index)
        theirs = [random.Random(index), np.random.default_rng(index), random.SystemRandom()]
        model.call = lambda layer, x, _: layer(x, ours, theirs)
        return square_step(model, index), torch.rand(1, generator=ours), theirs[0].random()

    compare(calling(Drawing, None), step)


def test_iterator_as_argument_is_refused() -> None:
    class Iterating(Base):
        def forward(self, x: Tensor, scales: Iterator[float]) -> Tensor:
            return self.mix(x, next(scales))

    model = Calling(Iterating, lambda layer, x, index: layer(x, iter([0.5])))
    with apply_partial_checkpoint(model), pytest.raises(TypeError, match="is an iterator"):
        model(batch(0))


def test_object_whose_tensors_change_is_an_error() -> None:
    class Graph:
        def __init__(self, x: Tensor) -> None:
            self.x = x

    class Message(Base):
        def forward(self, graph: Graph) -> Graph:
            graph.x = self.mix(graph.x)
            return graph

    model = Stack(Message, 2)
    with apply_partial_checkpoint(model):
        graph = Graph(model.stem(batch(0)))
        for layer in model.layers:
            graph = layer(graph)
        with pytest.raises(RuntimeError, match="an object of class Graph, has other tensors"):
            graph.x.sum().backward()


def test_module_as_argument() -> None:
    class Given(Base):
        def forward(self, x: Tensor, norm: nn.Module) -> Tensor:
            return self.mix(norm(x))

    class Model(Stack):
        def __init__(self) -> None:
            super().__init__(Given, 3)
            self.shared = nn.BatchNorm1d(DIM)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x, self.shared)
            return self.head(x)

    compare(Model)


def test_tuple_subclass_with_its_own_constructor() -> None:
    class Pair(tuple):
        def __new__(cls, first: Tensor, second: Tensor) -> Pair:
            return super().__new__(cls, (first, second))

    class Pairing(Base):
        def forward(self, pair: Pair) -> Tensor:
            assert type(pair) is Pair
            return self.mix(pair[0], pair[1])

    compare(calling(Pairing, lambda layer, x, index: layer(Pair(x, torch.ones(DIM) * 2))))


def test_tensor_of_inference_mode_as_argument() -> None:
    with torch.inference_mode():
        bias = torch.ones(DIM)

    class Biased(Base):
        def forward(self, x: Tensor, bias: Tensor) -> Tensor:
            return self.mix(x + bias)

    compare(calling(Biased, lambda layer, x, index: layer(x, bias)))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_keywords_that_checkpoint_has_too() -> None:
    class Flagged(Base):
        def forward(self, x: Tensor, *, debug: bool = True, early_stop: float = 0.0) -> Tensor:
            return self.mix(x, early_stop if not debug else 9.0)

    def factory() -> nn.Module:
        return Calling(Flagged, lambda layer, x, index: layer(x, debug=False, early_stop=2.0))

    compare(factory)
    torch.manual_seed(0)
    model = factory()
    expected = model(batch(0))
    with apply_partial_checkpoint(model):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(batch(0)), expected)


# --- surroundings


VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE", default=1.0)


@contextmanager
def variable() -> Iterator[None]:
    token = VARIABLE.set(0.25)
    try:
        yield
    finally:
        VARIABLE.reset(token)


@contextmanager
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


class Sensitive(Base):
    def forward(self, x: Tensor) -> Tensor:
        scale = torch.linspace(0.1, VARIABLE.get(), DIM)
        q = self.up(x)[None, None]
        mixed = nn.functional.scaled_dot_product_attention(q, q, q)[0, 0]
        return self.mix(mixed, scale.to(x.dtype) / 3)


@pytest.mark.parametrize(
    "around",
    [
        variable,
        double,
        lambda: torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH),
    ],
    ids=["context variable", "default dtype", "attention kernel"],
)
def test_what_stood_around_the_forward_alone(around: Any) -> None:
    def step(model: nn.Module, index: int) -> Tensor:
        with around():
            loss = model(batch(index).float()).pow(2).mean()
        loss.backward()
        return loss.detach()

    compare(stack_of(Sensitive), step)


def test_backward_inside_a_block() -> None:
    class Energy(Base):
        def forward(self, x: Tensor) -> Tensor:
            if not x.requires_grad:
                x = x.requires_grad_()
            energy = self.mix(x).pow(2).sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return x - 0.1 * force

    compare(stack_of(Energy), ratio=None)


def test_optimizer_that_steps_in_backward() -> None:
    class Ending(Base):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.zeros(DIM))

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x) + self.bias

    def factory() -> nn.Module:
        model = Stack(Ending, 3)
        for parameter in model.parameters():
            optimizer = torch.optim.SGD([parameter], lr=0.1)

            def now(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(now)
        return model

    compare(factory, optimizer=None)


def test_parameter_changed_between_forward_and_backward_is_an_error() -> None:
    class Special(nn.Parameter):
        pass

    class Own(Base):
        def __init__(self) -> None:
            super().__init__()
            self.gain = Special(torch.ones(DIM))

        def forward(self, x: Tensor) -> Tensor:
            return self.mix(x + self.gain)

    model = Stack(Own, 2)
    with apply_partial_checkpoint(model):
        loss = model(batch(0)).sum()
        with torch.no_grad():
            model.layers[0].gain.add_(1)
        with pytest.raises(RuntimeError, match="'gain' of a checkpointed Own was modified"):
            loss.backward()


# --- forwards of odd kinds


class StaticForward(Base):
    @staticmethod
    def forward(x: Tensor) -> Tensor:  # type: ignore[override]
        return torch.sin(torch.tanh(x))


class PropertyForward(Base):
    @property
    def forward(self) -> Any:  # type: ignore[override]
        return self.mix


@pytest.mark.parametrize("block", [StaticForward, PropertyForward])
def test_forward_that_is_no_function(block: type[nn.Module]) -> None:
    model = Stack(block, 2)
    plain = model(batch(0))
    with apply_partial_checkpoint(model):
        assert torch.equal(model(batch(0)), plain)
        model(batch(0)).sum().backward()
    assert type(model.layers[0]) is block


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_torchscript_state_in_a_block_is_refused() -> None:
    class Scripted(Base):
        def __init__(self) -> None:
            super().__init__()
            self.scripted = torch.jit.script(nn.BatchNorm1d(DIM))

    with pytest.raises(ValueError, match="TorchScript"):
        apply_partial_checkpoint(Stack(Scripted, 2), layers=Scripted)


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_tracing_sees_the_plain_block() -> None:
    model = Stack(lambda: MlpBlock(dropout=0.0), 2)
    with apply_partial_checkpoint(model):
        traced = torch.jit.trace(model, batch(0))
    assert torch.equal(traced(batch(1)), model(batch(1)))


def test_recompute_can_be_asked_for() -> None:
    """The way out for side effects elsewhere: they can be made to happen once."""
    log: list[bool] = []

    class Logging(Base):
        def forward(self, x: Tensor) -> Tensor:
            log.append(is_recomputing())
            return self.mix(x)

    compare(stack_of(Logging), optimizer=adam, steps=1)
    assert (log.count(False), log.count(True)) == (6, 3)  # plain, forward; recompute
