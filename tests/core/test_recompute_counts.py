"""What is recomputed, how often, and what is held meanwhile: counted, not assumed."""

from __future__ import annotations

import gc
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from helpers import (
    DIM,
    MlpBlock,
    Stack,
    assert_same,
    batch,
    executions,
    learn,
    square_step,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_ckpt import apply_partial_checkpoint, is_recomputing

NAMES = [f"layers.{i}" for i in range(4)]


def counts_of(model: nn.Module, action: Callable[[], Any], names: list[str] = NAMES) -> list[int]:
    """How often the inside of each block ran during the action."""
    with executions(model, names) as counts:
        action()
    return [counts[name] for name in names]


# --- forwards per block


@pytest.mark.parametrize(
    ("every_n", "expected"),
    [(1, [2, 2, 2, 2]), (2, [2, 1, 2, 1]), (3, [2, 1, 1, 2]), (4, [2, 1, 1, 1]), (9, [2, 1, 1, 1])],
)
def test_two_forwards_for_checkpointed_blocks_one_for_kept(
    every_n: int, expected: list[int]
) -> None:
    """Report G5, pitfall 15: the ratio is real; the first block always is checkpointed."""
    model = Stack()
    with apply_partial_checkpoint(model, every_n=every_n) as handle:
        assert counts_of(model, lambda: square_step(model, 0)) == expected
        assert [b.action for b in handle.plan] == [
            "recompute" if n == 2 else "keep" for n in expected
        ]
    assert counts_of(model, lambda: square_step(model, 0)) == [1, 1, 1, 1]


class EncoderDecoder(nn.Module):
    """Two stacks; one count runs through both."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.ModuleList(MlpBlock() for _ in range(3))
        self.decoder = nn.ModuleList(MlpBlock() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in [*self.encoder, *self.decoder]:
            x = layer(x)
        return x


def test_one_count_runs_through_the_whole_model() -> None:
    """Semantics of every_n: 3 + 3 blocks, every_n=2: encoder 0, 2 and decoder 1."""
    model = EncoderDecoder()
    names = [f"{stack}.{i}" for stack in ("encoder", "decoder") for i in range(3)]
    with apply_partial_checkpoint(model, every_n=2) as handle:
        assert [b.name for b in handle.plan] == names
        assert counts_of(model, lambda: square_step(model, 0), names) == [2, 1, 2, 1, 2, 1]


def test_count_starts_anew_for_each_model() -> None:
    """Pitfall 16: no global counter."""
    for _ in range(2):
        model = Stack(num_blocks=3)
        with apply_partial_checkpoint(model, every_n=2):
            assert counts_of(model, lambda m=model: square_step(m, 0), NAMES[:3]) == [2, 1, 2]


class OtherBlock(MlpBlock):
    """A second class."""


class Mixed(Stack):
    """Blocks of two classes, in turn."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([MlpBlock(), OtherBlock(), MlpBlock(), OtherBlock()])


FORMS: dict[str, tuple[Any, list[int]]] = {
    "a class": (OtherBlock, [1, 2, 1, 2]),
    "its base class": (MlpBlock, [2, 2, 2, 2]),
    "several classes": ([MlpBlock, OtherBlock], [2, 2, 2, 2]),
    "tuple of classes": ((OtherBlock,), [1, 2, 1, 2]),
    "a class name": ("OtherBlock", [1, 2, 1, 2]),
    "class names": (["OtherBlock"], [1, 2, 1, 2]),
    "a pattern": ("layers.*", [2, 2, 2, 2]),
    "several patterns": (["layers.0", "layers.3"], [2, 1, 1, 2]),
    "a character class": ("layers.[12]", [1, 2, 2, 1]),
    "class and pattern": ([OtherBlock, "layers.0"], [2, 2, 1, 2]),
    "a predicate": (lambda name, module: name == "layers.2", [1, 1, 2, 1]),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_layers(form: str) -> None:
    """Report A14: class, classes, names, patterns, predicate."""
    layers, expected = FORMS[form]
    model = Mixed()
    with apply_partial_checkpoint(model, layers=layers) as handle:
        assert counts_of(model, lambda: square_step(model, 0)) == expected
        assert [b.name for b in handle.plan] == [
            name for name, n in zip(NAMES, expected, strict=True) if n == 2
        ]


def test_nested_matches_take_the_outermost() -> None:
    """A block inside a block would be recomputed twice; the plan's notes say what was dropped."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MlpBlock()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x)

    model = Stack(Outer, 4)
    names = [f"{name}.inner" for name in NAMES]
    with apply_partial_checkpoint(model, layers=[Outer, MlpBlock]) as handle:
        assert [b.name for b in handle.plan] == NAMES
        assert handle.plan.notes
        assert counts_of(model, lambda: square_step(model, 0), names) == [2] * 4


# --- where there is nothing to recompute


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_no_recompute_without_gradients(mode: Callable[[], Any]) -> None:
    """Runs once, returns what plain returns, warns about nothing, in train and eval mode."""
    model = Stack(lambda: MlpBlock(dropout=0.0))
    expected = model(batch(0)).detach()
    for training in (True, False):
        model.train(training)
        with apply_partial_checkpoint(model), warnings.catch_warnings(), mode():
            warnings.simplefilter("error")
            with executions(model, NAMES) as counts:
                result = model(batch(0))
        assert [counts[name] for name in NAMES] == [1] * 4
        assert torch.equal(result, expected)
        assert not result.requires_grad


def test_no_recompute_when_everything_is_frozen() -> None:
    """Report B2, B3: frozen blocks run once and cost nothing; the head trains; no warning."""
    model = Stack().requires_grad_(False)
    model.head.requires_grad_(True)
    with apply_partial_checkpoint(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counts_of(model, lambda: square_step(model, 0)) == [1] * 4
        model.zero_grad(set_to_none=True)
        with saved_bytes() as saved:
            loss = model(batch(0)).pow(2).mean()
        frozen_held = saved.total()
        loss.backward()
    with saved_bytes() as saved:
        model(batch(0)).pow(2).mean()
    assert frozen_held == saved.total()


def test_first_half_frozen() -> None:
    """Report B2: only blocks that a gradient reaches are replayed."""
    model = Stack()
    model.stem.requires_grad_(False)
    model.layers[:2].requires_grad_(False)
    with apply_partial_checkpoint(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert counts_of(model, lambda: square_step(model, 0)) == [1, 1, 2, 2]


def test_frozen_blocks_with_an_input_that_needs_a_gradient() -> None:
    """Report A10: frozen blocks above a trainable stem are recomputed."""
    model = Stack()
    model.layers.requires_grad_(False)
    with apply_partial_checkpoint(model):
        assert counts_of(model, lambda: square_step(model, 0)) == [2] * 4


def test_eval_mode_with_gradients_is_recomputed() -> None:
    """Report I5, pitfall 13: the mode does not matter, gradients do."""
    model = Stack().eval()
    with apply_partial_checkpoint(model):
        assert counts_of(model, lambda: square_step(model, 0)) == [2] * 4


def test_gradients_switched_on_inside_no_grad() -> None:
    """The decision is taken where the block is called, not where the model is."""
    model = Stack()
    with apply_partial_checkpoint(model), torch.no_grad(), torch.enable_grad():
        assert counts_of(model, lambda: square_step(model, 0)) == [2] * 4


def test_forward_without_backward_runs_once() -> None:
    """Nothing is recomputed before backward asks for it."""
    model = Stack()
    with apply_partial_checkpoint(model):
        assert counts_of(model, lambda: model(batch(0))) == [1] * 4


def test_block_called_directly() -> None:
    """A block on its own is checkpointed too, as a Sequential would call it."""
    model = Stack()
    with apply_partial_checkpoint(model):
        got = counts_of(model, lambda: model.layers[1](batch(0)).sum().backward())
    assert got == [0, 2, 0, 0]


def test_sequential_container() -> None:
    """Blocks in a Sequential, as children of the model itself."""
    model = nn.Sequential(MlpBlock(), MlpBlock(), MlpBlock())
    with apply_partial_checkpoint(model) as handle:
        names = [b.name for b in handle.plan]
        assert names == ["0", "1", "2"]
        assert counts_of(model, lambda: square_step(model, 0), names) == [2, 2, 2]


# --- is_recomputing


LOG: list[tuple[str, bool]] = []


class LoggingBlock(MlpBlock):
    """Has a side effect, once per step thanks to `is_recomputing`."""

    def forward(self, x: Tensor) -> Tensor:
        LOG.append(("all", is_recomputing()))
        if not is_recomputing():
            LOG.append(("once", True))
        return torch.sin(super().forward(x))


def test_is_recomputing() -> None:
    """Report C5, pitfall 26: True in the recompute only, False before, between and after."""
    LOG.clear()
    model = Stack(LoggingBlock, 4)
    assert not is_recomputing()
    with apply_partial_checkpoint(model, every_n=2):
        loss = model(batch(0)).sum()
        assert LOG.count(("all", True)) == 0
        loss.backward()
        assert not is_recomputing()
    kinds = Counter(LOG)
    assert kinds == {("all", False): 4, ("once", True): 4, ("all", True): 2}


def test_is_recomputing_after_an_error_and_in_hooks() -> None:
    """It is False again after a recompute that raised; a gradient hook in another block sees it."""
    LOG.clear()

    class Failing(LoggingBlock):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if is_recomputing():
                raise RuntimeError("boom")
            return torch.sin(y)

    model = Stack(Failing, 4)
    with apply_partial_checkpoint(model):
        with pytest.raises(RuntimeError, match="boom"):
            square_step(model, 0)
        assert not is_recomputing()


def test_is_recomputing_is_of_one_thread() -> None:
    """Another thread that runs a plain forward meanwhile is not recomputing."""
    answers: list[bool] = []

    class Asking(MlpBlock):
        def forward(self, x: Tensor) -> Tensor:
            if is_recomputing():
                thread = threading.Thread(target=lambda: answers.append(is_recomputing()))
                thread.start()
                thread.join()
            return torch.sin(super().forward(x))

    model = Stack(Asking, 2)
    with apply_partial_checkpoint(model):
        square_step(model, 0)
    assert answers == [False, False]


# --- bytes


@contextmanager
def saved_bytes() -> Iterator[Counter[tuple[int, int]]]:
    """Bytes that autograd keeps for backward (parameters left out), by storage."""
    saved: Counter[tuple[int, int]] = Counter()

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not (
            tensor._base is not None and isinstance(tensor._base, nn.Parameter)
        ):
            storage = tensor.untyped_storage()
            saved[storage.data_ptr(), storage.nbytes()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield saved


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that were made under this mode and are still alive."""

    def __init__(self, *known: Tensor) -> None:
        super().__init__()
        self.live = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in known}  # not counted

    def _end(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self.live += storage.nbytes()
                    weakref.finalize(storage, self._end, storage._cdata, storage.nbytes())
        return out


ROWS = 16
BLOCK_INPUT = ROWS * DIM * 4  # bytes


class ByteBlock(nn.Module):
    """Its activations are known: tanh keeps (ROWS, 4 * DIM), the product keeps two of (ROWS, DIM).

    Saved for backward: x (the input, for `up` and the product), tanh's output, `down`'s output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, 4 * DIM)
        self.down = nn.Linear(4 * DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.down(torch.tanh(self.up(x)))


INNER = ROWS * 4 * DIM * 4 + ROWS * DIM * 4  # bytes that a kept block holds beside its input


def held_after_forward(every_n: int | None) -> int:
    """Live bytes between forward and backward, the model and the batch not counted."""
    model = Stack(ByteBlock, 6)
    x = batch(0, rows=ROWS)
    handle = None if every_n is None else apply_partial_checkpoint(model, every_n=every_n)
    with LiveBytes(x, *model.parameters()) as bytes_:
        loss = model(x).sum()
        held = bytes_.live
        loss.backward()
        del loss
        for p in model.parameters():
            p.grad = None
        assert bytes_.live == 0, "something is alive after the step, perhaps in a cycle"
    if handle is not None:
        handle.remove()
    return held


@pytest.mark.parametrize(("every_n", "num_recomputed"), [(1, 6), (2, 3), (3, 2), (4, 2), (6, 1)])
def test_bytes_held_after_forward(every_n: int, num_recomputed: int) -> None:
    """Report G5: kept blocks x block activations + checkpointed blocks x inputs, to the byte.

    Every block holds its input in either case, so each checkpointed block saves `INNER` exactly.
    (The generator state that each one keeps is made outside of torch's dispatcher: not counted.)
    """
    plain = held_after_forward(None)
    ours = held_after_forward(every_n)
    assert plain >= 6 * (BLOCK_INPUT + INNER)
    assert ours == plain - num_recomputed * INNER


def test_bytes_fall_with_every_n() -> None:
    """Report G5: more checkpointed blocks, fewer bytes."""
    held = [held_after_forward(n) for n in (1, 2, 3, 6)]
    assert held == sorted(held)
    assert held[-1] < held_after_forward(None)


class MaskedBlock(ByteBlock):
    """Has a big table that no forward changes: a mask buffer, and one that is a plain attribute."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(size), persistent=False)
        self.table = torch.ones(size)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.mask[0] * self.table[0])


def test_unchanged_buffers_cost_no_memory() -> None:
    """Report G5: to replay state costs bytes only for state that changes."""
    held = []
    for size in (64, 65536):  # small ones are copied in any case
        model, x = Stack(lambda size=size: MaskedBlock(size), 4), batch(0, rows=ROWS)
        tables = [layer.table for layer in model.layers]
        known = [x, *model.parameters(), *model.buffers(), *tables]
        with apply_partial_checkpoint(model), LiveBytes(*known) as bytes_:
            loss = model(x).sum()
            held.append(bytes_.live)
            loss.backward()
    assert held[1] <= held[0]


class WideBlock(ByteBlock):
    """Takes keyword and nested tensors, all of which it must hold, and nothing else."""

    def forward(self, x: Tensor, *, extras: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(x) + torch.sin(extras["bias"])


def test_saved_tensor_hooks_see_every_argument() -> None:
    """Semantics of offload: tensors in keyword and nested arguments pass through the hooks too."""
    block_model = Stack(WideBlock, 2)
    bias = torch.randn(ROWS, DIM, requires_grad=True)
    x = torch.randn(ROWS, DIM, requires_grad=True)
    seen: list[int] = []
    with apply_partial_checkpoint(block_model):
        hooks = torch.autograd.graph.saved_tensors_hooks(
            lambda t: (seen.append(t.data_ptr()), t)[1], lambda t: t
        )
        with hooks:
            y = block_model.layers[0](x, extras={"bias": bias})
        assert {x.data_ptr(), bias.data_ptr()} <= set(seen)
        y.sum().backward()
    assert bias.grad is not None


# --- nothing alive after the step


class Watched(MlpBlock):
    """Keeps weak references to its input and to an inner activation."""

    alive: list[weakref.ref[Any]] = []

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        h = torch.tanh(self.up(x))
        Watched.alive += [weakref.ref(x.untyped_storage()), weakref.ref(h)]
        return torch.sin(x + self.down(self.dropout(h)))


def _alive() -> int:
    gc.collect()
    return sum(ref() is not None for ref in Watched.alive)


@pytest.mark.parametrize("every_n", [1, 2])
def test_nothing_is_alive_after_the_step(every_n: int) -> None:
    """Report J3, pitfall 45: weak references to inputs and activations die with the step."""
    Watched.alive = []
    model = Stack(Watched, 4)
    with apply_partial_checkpoint(model, every_n=every_n):
        for index in range(2):
            square_step(model, index)
        assert len(Watched.alive) == 2 * 2 * (4 + 4 // every_n)
        assert _alive() == 0


def test_inner_activations_are_dropped_in_forward() -> None:
    """A checkpointed block holds its input until backward, and no inner activation."""
    Watched.alive = []
    model = Stack(Watched, 4)
    with apply_partial_checkpoint(model):
        loss = model(batch(0)).sum()
        gc.collect()
        inner = [ref() for ref in Watched.alive[1::2]]
        assert inner == [None] * 4
        del loss
        assert _alive() == 0, "a graph that is thrown away takes everything with it"


def test_nothing_is_alive_after_an_exception() -> None:
    """Pitfall 45: also after an interrupt in the recompute, once the traceback is gone."""

    class Stopping(Watched):
        def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
            y = super().forward(x)
            if is_recomputing():
                raise RuntimeError("boom")
            return torch.sin(y)

    Watched.alive = []
    model = Stack(Stopping, 4)
    with apply_partial_checkpoint(model):
        with pytest.raises(RuntimeError, match="boom"):
            square_step(model, 0)
        assert _alive() == 0


def test_model_dies_after_removal() -> None:
    """Neither a handle nor a class cache keeps a model alive, applied or removed."""
    for removed in (True, False):
        model = Stack()
        handle = apply_partial_checkpoint(model)
        square_step(model, 0)
        if removed:
            handle.remove()
        ref = weakref.ref(model.layers[0].up.weight)
        del model, handle
        gc.collect()
        assert ref() is None


def test_live_bytes_are_constant_over_steps() -> None:
    """Report J3: no growth from step to step."""
    model = Stack(Watched, 4)
    levels = []
    with apply_partial_checkpoint(model), LiveBytes(*model.parameters()) as bytes_:
        for index in range(4):
            square_step(model, index)
            model.zero_grad(set_to_none=True)
            levels.append(bytes_.live)
    assert len(set(levels)) == 1


def test_no_attribute_appears_on_modules_while_two_graphs_are_alive() -> None:
    """Report F4: no per-call state lives on a module."""
    model = Stack()
    before = {name: sorted(vars(m)) for name, m in model.named_modules()}
    with apply_partial_checkpoint(model):
        one, two = model(batch(0, rows=3)), model(batch(1, rows=5))
        assert {name: sorted(vars(m)) for name, m in model.named_modules()} == before
        (one.sum() + two.sum()).backward()
        assert {name: sorted(vars(m)) for name, m in model.named_modules()} == before


def test_gradients_are_those_of_plain_in_every_thread() -> None:
    """Two models train in two threads at once."""
    plain = [Stack(lambda: MlpBlock(dropout=0.0)) for _ in range(2)]
    expected = [learn(m, batch(i)) for i, m in enumerate(plain)]
    results: dict[int, list[Tensor | None]] = {}

    def work(index: int) -> None:
        for _ in range(5):
            results[index] = learn(plain[index], batch(index))

    handles = [apply_partial_checkpoint(m) for m in plain]
    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for handle in handles:
        handle.remove()
    for index in range(2):
        assert_same(results[index], expected[index])
