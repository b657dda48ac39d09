"""Checkpointed blocks under torch.compile: one graph, no break, equal results, fewer saved bytes.

Compiled with "aot_eager", which traces and partitions as the default does, without code
generation. What is counted: graphs that dynamo made, and the checkpoint calls in them.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers import DIM, MlpBlock, Stack, assert_same, batch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from lightning_ckpt import Handle, apply_partial_checkpoint

# Torch's own words while compiling, none of which is about checkpointing.
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch.*",
    "ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning",
)


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class WideBlock(nn.Module):
    """Inner activations of four times the width, tanh outputs that a compiler would save."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)).sin()) * scale


def model_of(block: type[nn.Module] = WideBlock) -> Stack:
    """The same three blocks each time."""
    torch.manual_seed(0)
    return Stack(block, 3)


def compile_whole(model: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    return torch.compile(model, backend=backend, fullgraph=True)


def compile_blocks_in_place(model: Any, backend: Any) -> Callable[[Tensor], Tensor]:
    for layer in model.layers:
        layer.compile(backend=backend, fullgraph=True)
    return model


def compile_whole_in_place(model: nn.Module, backend: Any) -> Callable[[Tensor], Tensor]:
    model.compile(backend=backend, fullgraph=True)
    return model


WAYS = [compile_whole, compile_whole_in_place, compile_blocks_in_place]


def saved_bytes(run: Callable[[Tensor], Tensor], x: Tensor) -> tuple[int, Tensor]:
    """Bytes that one forward keeps for backward, and its result."""
    storages: dict[int, int] = {}
    keep: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        keep.append(tensor)
        storages[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        result = run(x)
    return sum(storages.values()), result


def measure(
    way: Callable[..., Any], order: str | None, block: type[nn.Module] = WideBlock
) -> tuple[int, Tensor, list[Tensor], CompileCounterWithBackend, Handle | None]:
    """Compile and run one step. `order` is when to apply: None, "before", or "after" compiling."""
    model, backend = model_of(block), CompileCounterWithBackend("aot_eager")
    handle = apply_partial_checkpoint(model) if order == "before" else None
    run = way(model, backend)
    if order == "after":
        handle = apply_partial_checkpoint(model)
    saved, y = saved_bytes(run, batch(0, rows=64))
    loss = y.pow(2).mean()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return saved, loss.detach(), grads, backend, handle


def checkpoint_calls(backend: CompileCounterWithBackend) -> int:
    """Checkpoint regions in the graphs that dynamo handed to the backend."""
    return sum(
        "checkpoint" in str(node.target)
        for graph in backend.graphs
        for node in graph.graph.nodes
        if node.op == "call_function"
    )


@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_compiled_model(way: Callable[..., Any], order: str) -> None:
    """Report A15, H7: zero graph breaks, as many graphs as plain, equal results, fewer bytes."""
    plain_saved, plain_loss, plain_grads, plain_backend, _ = measure(way, None)
    torch._dynamo.reset()
    saved, loss, grads, backend, handle = measure(way, order)
    assert handle is not None
    assert backend.frame_count == plain_backend.frame_count >= 1
    assert checkpoint_calls(backend) >= 1
    assert_same(loss, plain_loss)
    assert len(grads) == len(plain_grads) > 0
    for ours, other in zip(grads, plain_grads, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-5, atol=1e-7)
    assert saved < plain_saved
    handle.remove()


def test_many_blocks_compiled_in_place_share_their_graphs() -> None:
    """Report H7: twelve blocks need no more graphs than in plain (dynamo gives up after eight)."""

    def graphs(checkpointed: bool) -> int:
        torch._dynamo.reset()
        model, backend = Stack(WideBlock, 12), CompileCounterWithBackend("aot_eager")
        handle = apply_partial_checkpoint(model) if checkpointed else None
        compile_blocks_in_place(model, backend)(batch(0)).sum().backward()
        if handle is not None:
            handle.remove()
        return backend.frame_count

    assert graphs(True) == graphs(False)


@pytest.mark.parametrize("order", ["before", "after"])
def test_compiled_children(order: str) -> None:
    """Report H6, H7: `torch.compile(block)` modules in place of the blocks.

    Either they are checkpointed (found through the wrapper), or refused aloud; never silence.
    """
    plain = model_of()
    expected = plain(batch(0)).pow(2).mean()
    expected.backward()
    model, backend = model_of(), CompileCounterWithBackend("aot_eager")

    def wrap() -> None:
        for index, layer in enumerate(model.layers):
            model.layers[index] = torch.compile(layer, backend=backend)

    if order == "before":
        handle = apply_partial_checkpoint(model)
        wrap()
    else:
        wrap()
        keys = list(model.state_dict())
        handle = apply_partial_checkpoint(model)
        assert list(model.state_dict()) == keys
    assert [b.action for b in handle.plan] == ["recompute"] * 3
    plain_saved, _ = saved_bytes(plain, batch(0))
    saved, y = saved_bytes(model, batch(0))
    y.pow(2).mean().backward()
    for ours, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert ours.grad is not None
        torch.testing.assert_close(ours.grad, other.grad, rtol=1e-5, atol=1e-7)
    assert saved < plain_saved
    handle.remove()


@pytest.mark.parametrize("way", WAYS, ids=lambda w: w.__name__)
def test_removal_after_compiling(way: Callable[..., Any]) -> None:
    """After removal the compiled model is plain again: it saves what plain code saves."""
    model, backend = model_of(), CompileCounterWithBackend("aot_eager")
    handle = apply_partial_checkpoint(model)
    run = way(model, backend)
    run(batch(0, rows=64)).sum().backward()
    before = checkpoint_calls(backend)
    handle.remove()
    run(batch(0, rows=64)).sum().backward()
    assert checkpoint_calls(backend) == before
    assert type(model.layers[0]) is WideBlock


def test_keys_of_a_compiled_model_are_those_of_plain() -> None:
    """Report H2, H6: ours adds nothing to `_orig_mod`."""
    plain = torch.compile(model_of(), backend="eager")
    model = model_of()
    with apply_partial_checkpoint(model):
        ours = torch.compile(model, backend="eager")
        assert list(ours.state_dict()) == list(plain.state_dict())
        assert [n for n, _ in ours.named_parameters()] == [n for n, _ in plain.named_parameters()]


def test_no_recompilation_from_step_to_step() -> None:
    """Three steps and an evaluation under no_grad: one graph each for train and for no_grad."""
    model, backend = model_of(), CompileCounterWithBackend("aot_eager")
    with apply_partial_checkpoint(model):
        run = torch.compile(model, backend=backend, fullgraph=True)
        for index in range(3):
            run(batch(index)).sum().backward()
        assert backend.frame_count == 1
        with torch.no_grad():
            run(batch(0))
            run(batch(1))
        assert backend.frame_count == 2


def test_dropout_in_a_compiled_block() -> None:
    """Report D4: with one seed the compiled, checkpointed step gives the gradients of plain."""

    def grads(checkpointed: bool) -> list[Tensor | None]:
        torch._dynamo.reset()
        model = model_of(MlpBlock)
        handle = apply_partial_checkpoint(model) if checkpointed else None
        run = torch.compile(model, backend="aot_eager", fullgraph=True)
        torch.manual_seed(5)
        run(batch(0, rows=64)).pow(2).mean().backward()
        if handle is not None:
            handle.remove()
        return [p.grad for p in model.parameters()]

    for ours, plain in zip(grads(True), grads(False), strict=True):
        assert ours is not None
        assert plain is not None
        torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-7)


def test_memory_budget_of_the_compiler_is_warned_about() -> None:
    """Pitfall 3, report D4: below 1 dropout is drawn anew by the compiler, with or without us."""
    with apply_partial_checkpoint(model := model_of(MlpBlock)):
        run = torch.compile(model, backend="eager", fullgraph=True)
        budget = torch._functorch.config.patch(activation_memory_budget=0.5)
        with budget, pytest.warns(UserWarning, match=r"_memory_budget is 0\.5.*set it to 1"):
            run(batch(0))


class NormBlock(WideBlock):
    """Moves running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(DIM)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        return super().forward(self.norm(x))


class CountingBlock(WideBlock):
    """Counts its forwards in a buffer, and computes with the count."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = super().forward(x / (self.count + 0.0))
        self.count.add_(1)
        return y


@pytest.mark.parametrize("block", [NormBlock, CountingBlock], ids=lambda b: b.__name__)
def test_state_under_compile_is_right_refused_or_warned_about(block: type[nn.Module]) -> None:
    """The replay of buffers holds in eager; compiled code that would be wrong is never silent."""
    results: list[list[Tensor]] = []
    said = False
    for checkpointed in (False, True):
        torch._dynamo.reset()
        model = model_of(block)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                handle = apply_partial_checkpoint(model) if checkpointed else None
                run = torch.compile(model, backend="aot_eager")
                run(batch(0)).pow(2).mean().backward()
            except (RuntimeError, ValueError, NotImplementedError):
                assert checkpointed
                return
        said = said or any(
            "lightning_ckpt" in str(w.message) or "checkpoint" in str(w.message) for w in warned
        )
        results.append([p.grad for p in model.parameters()] + list(model.buffers()))
        if handle is not None:
            handle.remove()
    right = all(torch.allclose(a, b, rtol=1e-5, atol=1e-7) for a, b in zip(*results, strict=True))
    assert right or said


def test_eager_copy_of_a_compiled_and_checkpointed_model() -> None:
    """Report H4, H6: deepcopy of a model with blocks compiled in place is plain in class."""
    model = model_of()
    with apply_partial_checkpoint(model):
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        model(batch(0)).sum().backward()
        twin = copy.deepcopy(model)
    assert type(twin.layers[0]) is WideBlock
