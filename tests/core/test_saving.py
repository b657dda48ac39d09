"""What a partly recomputed block keeps, however its code calls for it, and at what cost."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import pytest
import torch
from helpers import DIM, ROWS, Stack, assert_same, batch, compare, seed_all, square_step
from torch import Tensor, nn
from torch.nn.functional import conv1d, linear, scaled_dot_product_attention, silu
from torch.nn.modules.module import register_module_forward_hook
from torch.overrides import TorchFunctionMode

from lightning_ckpt import apply_partial_checkpoint, is_recomputing
from lightning_ckpt.core import saving
from lightning_ckpt.core._torch import TorchDispatchMode
from lightning_ckpt.core.keeping import Keeping, Taking
from lightning_ckpt.core.saving import SAVED, narrow_contexts

aten = torch.ops.aten
F: Any = torch.nn.functional
Call = Callable[["Caller", Tensor], Tensor]


class Caller(nn.Module):
    """Calls for a product in some way, between two others of the same shape: what is kept in one
    order and taken in another would be wrong, and of a shape that fits."""

    def __init__(self, call: Call) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.weight = nn.Parameter(torch.randn(DIM, DIM) / 3)
        self.attention = nn.MultiheadAttention(DIM, 2)
        self.lstm = nn.LSTM(DIM, DIM)
        self._call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self._call(self, silu(self.first(x)))
        return torch.tanh(self.last(torch.tanh(self.last(x))))


def attend(query: Tensor) -> Tensor:
    heads = query[None, None]
    return scaled_dot_product_attention(heads, heads, heads)[0, 0]


def energy(model: Caller, x: Tensor) -> Tensor:
    """A block that runs backward inside its forward."""
    return torch.autograd.grad(((x @ model.weight).tanh() @ x.T).sum(), x, create_graph=True)[0]


CALLS: dict[str, Call] = {
    "@": lambda m, x: x @ m.weight,
    "reflected @": lambda m, x: x.__rmatmul__(x @ x.T),
    "matmul": lambda m, x: torch.matmul(x, m.weight),
    "the method mm": lambda m, x: x.mm(m.weight),
    "addmm": lambda m, x: torch.addmm(x, x, m.weight),
    "addmm_": lambda m, x: x.clone().addmm_(x, m.weight),
    "baddbmm": lambda m, x: torch.baddbmm(x[None], x[None], m.weight[None])[0],
    "inner": lambda m, x: torch.inner(x, m.weight),
    "linear": lambda m, x: linear(x, m.weight),
    "einsum": lambda m, x: torch.einsum("ij,jk->ik", x, m.weight),
    "tensordot": lambda m, x: torch.tensordot(x, m.weight, dims=1),
    "chain_matmul": lambda m, x: torch.linalg.multi_dot([x, m.weight, m.weight]),
    "matrix_power": lambda m, x: x @ torch.linalg.matrix_power(m.weight, 3),
    "convolution": lambda m, x: conv1d(x[None], x[:, :, None].mT[:, :, :1].mT.expand(-1, 3, 1))[0],
    "an operator": lambda m, x: aten.mm(x, m.weight),
    "an overload": lambda m, x: aten.mm.default(x, m.weight),
    "attention": lambda m, x: attend(x),
    "multi-head attention": lambda m, x: m.attention(x, x, x)[0],
    "vmap": lambda m, x: torch.vmap(m.last)(x),
    "a backward": energy,
}


class Executed(TorchDispatchMode):
    """Counts what is executed, by whether a block is being computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Counter[Any] = Counter()
        self.again: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        (self.again if is_recomputing() else self.first)[func] += 1
        return func(*args, **(kwargs or {}))


def plan_of(action: str, num_blocks: int) -> dict[str, Any]:
    return {"blocks": [{"name": f"layers.{i}", "action": action} for i in range(num_blocks)]}


def executed(call: Call, action: str, backward: bool = True) -> Executed:
    seed_all(0)
    model = Stack(lambda: Caller(call), 2)
    with apply_partial_checkpoint(model, plan=plan_of(action, 2)), Executed() as counts:
        loss = model(batch(0)).sum()
        if backward:
            loss.backward()
    return counts


@pytest.mark.parametrize("action", SAVED)
@pytest.mark.parametrize("name", CALLS)
def test_training_is_as_plain(name: str, action: str) -> None:
    compare(
        lambda: Stack(lambda: Caller(CALLS[name]), 2),
        square_step,
        plan=plan_of(action, 2),
        ratio=None,
    )


@pytest.mark.parametrize("name", [name for name in CALLS if name != "a backward"])
def test_however_it_is_called_it_is_kept(name: str) -> None:
    dear = SAVED["recompute_saving"]
    again = executed(CALLS[name], "recompute").again
    assert sum(again[operation] for operation in dear) >= 4
    again = executed(CALLS[name], "recompute_saving").again
    assert not [operation for operation in dear if again[operation]]
    assert again[aten.silu.default]


def test_attention_alone_is_kept() -> None:
    again = executed(CALLS["attention"], "recompute_saving_attention").again
    assert again[aten.addmm.default] == 6, "three in either block"
    assert not [operation for operation in SAVED["recompute_saving_attention"] if again[operation]]


def test_a_backward_in_a_forward_is_computed_in_full() -> None:
    """The block is computed in the middle of its forward for that, and nothing of it is kept: the
    recompute would take it for what comes later."""
    counts = executed(energy, "recompute_saving", backward=False)
    assert counts.again[aten.addmm.default] == 2, "of the first, in either block"


class _Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("action", SAVED)
def test_the_contexts_stand_around_dear_calls_alone(action: Any) -> None:
    """Note: [Narrow contexts]. They are Python for each operation, which costs a small block more
    than is spared."""
    seen = _Seen()
    block = nn.TransformerEncoderLayer(DIM, 2, batch_first=True, norm_first=True, activation=silu)
    x = batch(0)[None].requires_grad_()
    with saving.Narrow(seen, action):
        y = (block.norm1(x) * 2).relu()
        y = torch.softmax(y - y.mean(dim=-1, keepdim=True), dim=-1)
        assert not seen.operations
        attend(y[0])
        assert any(operation in SAVED[action] for operation in seen.operations)
        seen.operations.clear()
        block.linear1(y)
    assert (aten.addmm.default in seen.operations) == (action == "recompute_saving")


class _Plain(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def asked_and_seen(call: Callable[[Tensor], Any], x: Tensor) -> tuple[list[Any], list[Any]]:
    """The functions that a function mode is asked for, and the operations that come of them."""
    functions: list[Any] = []

    class Asked(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            functions.append(func)
            return func(*args, **(kwargs or {}))

    with _Seen() as seen, Asked():
        call(x)
    return functions, seen.operations


OF_PRODUCTS: dict[str, Callable[[Tensor], Any]] = {
    "linear": lambda x: linear(x, x),
    "matmul": lambda x: x @ x.T,
    "linalg_matmul": lambda x: torch.linalg.matmul(x, x.T),
    "linalg_multi_dot": lambda x: torch.linalg.multi_dot([x, x.T, x]),
    "linalg_matrix_power": lambda x: torch.linalg.matrix_power(x[:, :ROWS], 2),
    "matrix_power": lambda x: x[:, :ROWS].matrix_power(2),
    "inner": lambda x: x.inner(x),
    "cov": torch.cov,
    "corrcoef": torch.corrcoef,
    **{f"conv{n}d": lambda x, n=n: convolve(f"conv{n}d", x, n) for n in (1, 2, 3)},
    **{
        f"conv_transpose{n}d": lambda x, n=n: convolve(f"conv_transpose{n}d", x, n)
        for n in (1, 2, 3)
    },
    "lstm": lambda x: nn.LSTM(DIM, DIM, dtype=torch.double)(x.double()),  # not oneDNN's
    "gru": nn.GRU(DIM, DIM),
    "rnn_tanh": nn.RNN(DIM, DIM),
    "rnn_relu": nn.RNN(DIM, DIM, nonlinearity="relu"),
    "lstm_cell": nn.LSTMCell(DIM, DIM),
    "gru_cell": nn.GRUCell(DIM, DIM),
    "rnn_tanh_cell": nn.RNNCell(DIM, DIM),
    "rnn_relu_cell": nn.RNNCell(DIM, DIM, nonlinearity="relu"),
}


def convolve(name: str, x: Tensor, num_dims: int) -> Tensor:
    weight = torch.ones(1, 1, *[1] * num_dims)
    result: Tensor = getattr(F, name)(x.flatten().view(1, 1, *[1] * (num_dims - 1), -1), weight)
    return result


@pytest.mark.parametrize("name", sorted(saving._OF_PRODUCTS))
def test_calls_written_in_c_that_come_to_a_product(name: str) -> None:
    functions, operations = asked_and_seen(OF_PRODUCTS[name], batch(0))
    assert name in {func.__name__ for func in functions if type(func) in saving._IN_C}
    assert not SAVED["recompute_saving"].isdisjoint(operations)


IN_PYTHON: dict[str, Callable[[Tensor], Any]] = {
    **{
        name: getattr(F, name)
        for name in (
            "silu", "relu", "relu6", "elu", "leaky_relu", "mish", "hardswish", "hardsigmoid",
            "hardtanh", "glu", "dropout", "normalize", "instance_norm",
        )
    },
    **{name: lambda x, n=name: getattr(F, n)(x[None]) for name in ("dropout1d",)},
    **{name: lambda x, n=name: getattr(F, n)(x[None, None]) for name in ("dropout2d", "dropout3d")},
    "softmax": lambda x: F.softmax(x, -1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "layer_norm": lambda x: F.layer_norm(x, [DIM]),
    "rms_norm": lambda x: F.rms_norm(x, [DIM]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "batch_norm": lambda x: F.batch_norm(x, torch.zeros(DIM), torch.ones(DIM)),
    "embedding": lambda x: F.embedding(torch.tensor([0, 1]), x),
    "split": lambda x: x.split(2),
    "__rsub__": lambda x: 2 - x,
    "__rdiv__": lambda x: 2 / x,
    "__rpow__": lambda x: 2**x,
    "__len__": len,
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(saving._IN_PYTHON))
def test_calls_written_in_python_that_need_no_contexts(name: str) -> None:
    """Those that are listed come to nothing that is kept, and are known by their names."""
    x = batch(0) if name != "instance_norm" else batch(0)[None]
    functions, operations = asked_and_seen(IN_PYTHON[name], x)
    assert name in {func.__name__ for func in functions if type(func) not in saving._IN_C}
    assert SAVED["recompute_saving"].isdisjoint(operations)


# --- code that no function mode looks into


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
@pytest.mark.parametrize("action", SAVED)
@pytest.mark.parametrize("fullgraph", [False, True])
def test_compiled_functions_stay_whole(fullgraph: bool, action: str) -> None:
    graphs: list[int] = []

    def backend(module: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(sum(node.op.startswith("call") for node in module.graph.nodes))
        return module.forward

    def compiled() -> Call:
        def call(model: Caller, x: Tensor) -> Tensor:
            return torch.relu(x @ model.weight) @ model.weight

        return torch.compile(call, backend=backend, fullgraph=fullgraph)  # type: ignore[return-value]

    torch._dynamo.reset()
    call = compiled()
    compare(
        lambda: Stack(lambda: Caller(call), 2), square_step, plan=plan_of(action, 2), ratio=None
    )
    assert set(graphs) == {3}, "each with all that is called"


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")
def test_scripted_code_is_computed_again() -> None:
    def product(x: Tensor, weight: Tensor) -> Tensor:
        return x @ weight

    scripted = torch.jit.script(product)
    call: Call = lambda m, x: scripted(x, m.weight)  # noqa: E731
    compare(
        lambda: Stack(lambda: Caller(call), 2),
        square_step,
        plan=plan_of("recompute_saving", 2),
        ratio=None,
    )


# --- what is kept is known by the place of its call


def test_two_contexts_for_one_call() -> None:
    x = batch(0)

    def product(weight: Tensor) -> Tensor:
        return x @ weight

    weight = batch(1, rows=DIM)
    forward, recompute = narrow_contexts("recompute_saving")
    first = forward.run(product, weight)
    assert torch.equal(recompute.run(product, torch.zeros_like(weight)), first)
    assert not recompute.run(product, torch.zeros_like(weight)).any(), "taken once"


def logged(model: Caller, x: Tensor) -> Tensor:
    if not is_recomputing():
        with torch.no_grad():
            model.log = float((x @ model.weight).mean())
    return torch.tanh(x @ model.weight) @ model.weight


def cached(size: int | None) -> Call:
    """Angles, as of positions, that are computed once in a process."""

    @lru_cache(size)
    def angles(rows: int, scale: float) -> Tensor:
        return (torch.arange(rows)[:, None] / rows) @ torch.full((1, rows), scale)

    def call(model: Caller, x: Tensor) -> Tensor:
        with torch.no_grad():
            square = angles(DIM, model.scale)
        return torch.tanh(x @ (model.weight @ square)) @ model.weight

    return call


class ScaledCaller(Caller):
    """Each has another scale."""

    num_made = 0

    def __init__(self, call: Call) -> None:
        super().__init__(call)
        ScaledCaller.num_made += 1
        self.scale = 1.0 + ScaledCaller.num_made % 2


UNEQUAL: dict[str, Callable[[], Call]] = {
    "less in the recompute: a log": lambda: logged,
    "less in the recompute: a cache that is full": lambda: cached(None),
    "more in the recompute: a cache for one": lambda: cached(1),
}


@pytest.mark.parametrize("action", SAVED)
@pytest.mark.parametrize("name", UNEQUAL)
def test_a_recompute_that_calls_less_or_more(name: str, action: str) -> None:
    """Products of one shape, none of which may get the result of another."""

    def factory() -> Stack:
        call = UNEQUAL[name]()
        return Stack(lambda: ScaledCaller(call), 2)

    compare(factory, square_step, plan=plan_of(action, 2), ratio=None)


def unseen(model: Caller, x: Tensor) -> Tensor:
    with torch.inference_mode():  # nothing counts changes there
        scale = torch.zeros(ROWS, DIM)
        torch.mm(x, model.weight, out=scale)
    return torch.tanh(x) * scale.clone()


def halved(x: Tensor) -> Tensor:
    x[:, 0].mul_(0.5)
    return torch.tanh(x)


CHANGED: dict[str, tuple[Call, Any]] = {
    "relu_": (lambda m, x: (x @ m.weight).relu_(), aten.mm.default),
    "+=": (lambda m, x: (x @ m.weight).add_(x).tanh(), aten.mm.default),
    "a view": (lambda m, x: halved(x @ m.weight), aten.mm.default),
    "out=": (unseen, aten.mm.out),
}


@pytest.mark.parametrize("name", CHANGED)
def test_what_was_changed_in_place_is_computed_again(name: str) -> None:
    call, operation = CHANGED[name]
    compare(
        lambda: Stack(lambda: Caller(call), 2),
        square_step,
        plan=plan_of("recompute_saving", 2),
        ratio=None,
    )
    again = executed(call, "recompute_saving").again
    assert {one for one in SAVED["recompute_saving"] if again[one]} == {operation}
    assert again[operation] == 2, "once in either block"


def test_hooks_and_modes_around_the_forward_alone() -> None:
    """They do not come back for the recompute, and are no part of the place."""
    seed_all(0)
    model = Stack(lambda: Caller(CALLS["attention"]), 2)
    with apply_partial_checkpoint(model, plan=plan_of("recompute_saving", 2)), Executed() as counts:
        hook = register_module_forward_hook(lambda *_: None)
        with torch.device("cpu"), _Plain():
            loss = model(batch(0)).sum()
        hook.remove()
        loss.backward()
    assert counts.again
    assert not [operation for operation in SAVED["recompute_saving"] if counts.again[operation]]


def test_what_draws_leaves_its_generator_as_it_was() -> None:
    """Attention with dropout, on accelerators: a dropout after it must draw the same again."""

    def draw(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.native_dropout(x, 0.5, True)[0], torch.rand(2)

    keeping = Keeping({aten.native_dropout.default})
    x = batch(0)
    torch.manual_seed(0)
    with keeping:
        first = draw(x)
    torch.manual_seed(0)
    with Taking(keeping):
        again = draw(torch.zeros_like(x))
    assert_same(again, first)
