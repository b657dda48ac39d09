"""Any way to call a block, any result, in-place operations, and hooks: as in plain training."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from helpers import DIM, Stack, assert_same, batch, compare, executions, square_step, stack_of
from torch import Tensor, nn

from lightning_ckpt import apply_partial_checkpoint

# --- arguments


class Base(nn.Module):
    """Two layers, and a mask that belongs to the call."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)
        self.down = nn.Linear(DIM, DIM)

    def mix(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)) * scale)


class Positional(Base):
    def forward(self, x: Tensor, scale: Tensor, flag: bool, nothing: None) -> Tensor:
        assert flag is True
        assert nothing is None
        return self.mix(x, scale)


class Keyword(Base):
    def forward(self, *, hidden_states: Tensor, scale: Tensor | None = None) -> Tensor:
        assert scale is not None
        return self.mix(hidden_states, scale)


class DictArgument(Base):
    def forward(self, x: Tensor, extras: dict[str, Any]) -> Tensor:
        assert extras["flag"] == "on"
        return self.mix(x, extras["inner"]["scale"] * extras["factor"])


class SequenceArgument(Base):
    def forward(self, pair: tuple[Tensor, list[Tensor | None]]) -> Tensor:
        x, (scale, nothing) = pair
        assert isinstance(pair, tuple)
        assert nothing is None
        return self.mix(x, scale)


class Inputs(NamedTuple):
    x: Tensor
    scale: Tensor
    name: str = "inputs"


class NamedTupleArgument(Base):
    def forward(self, inputs: Inputs) -> Tensor:
        assert type(inputs) is Inputs
        assert inputs.name == "inputs"
        return self.mix(inputs.x, inputs.scale)


@dataclass
class State:
    x: Tensor
    scale: Tensor
    depth: int = 0
    history: list[Tensor] = field(default_factory=list)


@dataclass(frozen=True)
class FrozenState:
    x: Tensor
    scale: Tensor
    depth: int = 0


@dataclass
class DerivedState:
    """A dataclass whose constructor does not take all its fields."""

    x: Tensor
    scale: Tensor
    depth: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.depth = 7


class DataclassArgument(Base):
    def forward(self, state: Any) -> Tensor:
        assert isinstance(state, State | FrozenState | DerivedState)
        return self.mix(state.x, state.scale)


class Mask:
    """A mask that is an object of the user's own, which nobody can look into."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class ObjectArgument(Base):
    def forward(self, x: Tensor, mask: Mask) -> Tensor:
        assert type(mask) is Mask
        return self.mix(x, mask.values)


class VariadicArgument(Base):
    def forward(self, *tensors: Tensor, **options: Any) -> Tensor:
        return self.mix(tensors[0], tensors[1] * options["factor"])


def _derived(x: Tensor, scale: Tensor) -> DerivedState:
    return DerivedState(x, scale)


CALLS: dict[str, tuple[type[nn.Module], Callable[[nn.Module, Tensor, Tensor], Tensor]]] = {
    "positional with flag and None": (Positional, lambda b, x, s: b(x, s, True, None)),
    "flags by keyword": (Positional, lambda b, x, s: b(x, s, nothing=None, flag=True)),
    "keyword hidden state": (Keyword, lambda b, x, s: b(hidden_states=x, scale=s)),
    "dict with a tensor": (
        DictArgument,
        lambda b, x, s: b(x, {"inner": {"scale": s}, "factor": 2.0, "flag": "on"}),
    ),
    "ordered dict by keyword": (
        DictArgument,
        lambda b, x, s: b(x, extras=OrderedDict(inner={"scale": s}, factor=2.0, flag="on")),
    ),
    "tuple with a list": (SequenceArgument, lambda b, x, s: b((x, [s, None]))),
    "NamedTuple": (NamedTupleArgument, lambda b, x, s: b(Inputs(x, s))),
    "dataclass": (DataclassArgument, lambda b, x, s: b(State(x, s))),
    "frozen dataclass": (DataclassArgument, lambda b, x, s: b(state=FrozenState(x, s))),
    "dataclass with derived field": (DataclassArgument, lambda b, x, s: b(_derived(x, s))),
    "object": (ObjectArgument, lambda b, x, s: b(x, Mask(s))),
    "variadic": (VariadicArgument, lambda b, x, s: b(x, s, factor=0.5)),
}


class Caller(Stack):
    """Calls its blocks in the given way, with a trainable scale for them all."""

    def __init__(
        self, block: type[nn.Module], call: Callable[[nn.Module, Tensor, Tensor], Tensor]
    ) -> None:
        super().__init__(block, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, DIM))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = self.call(layer, x, self.scale)
        return self.head(x)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("every_n", [1, 2])
def test_call_signatures(name: str, every_n: int) -> None:
    """Report B5, B6: any signature; tensors by keyword or inside containers get gradients."""
    ours, _ = compare(lambda: Caller(*CALLS[name]), every_n=every_n)
    assert ours.grads[0]["scale"] is not None


@pytest.mark.parametrize("name", CALLS)
def test_only_the_keyword_tensor_needs_a_gradient(name: str) -> None:
    """Report B6: all parameters of the blocks and the hidden state are frozen, the scale trains."""

    def factory() -> nn.Module:
        model = Caller(*CALLS[name]).requires_grad_(False)
        model.scale.requires_grad_(True)
        return model

    ours, _ = compare(factory, ratio=None)
    assert ours.grads[0]["scale"] is not None


class ClosedOver(Base):
    """Uses a tensor that comes neither by argument nor as a parameter of its own."""

    outside: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x, self.outside[-1])


class ClosingStack(Stack):
    """Blocks see a trainable tensor of the model through a list."""

    def __init__(self) -> None:
        super().__init__(ClosedOver, 3)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, DIM))

    def forward(self, x: Tensor) -> Tensor:
        ClosedOver.outside.append(self.scale * 2)
        return super().forward(x)


def test_captured_tensor_gets_its_gradient() -> None:
    """Report B6: a tensor captured outside the arguments keeps its gradient path."""
    ours, _ = compare(ClosingStack)
    assert ours.grads[0]["scale"] is not None


# --- results


class PairBlock(Base):
    """Each block returns what `wrap` makes of the hidden state and an auxiliary term."""

    wrap: Callable[[Tensor, Tensor], Any]

    def forward(self, x: Tensor) -> Any:
        y = self.mix(x)
        return type(self).wrap(y, y.pow(2).mean())


class Output(NamedTuple):
    x: Tensor
    aux: Tensor
    name: str = "output"


@dataclass
class OutputData:
    x: Tensor
    aux: Tensor
    note: str | None = None


@dataclass(frozen=True)
class FrozenOutput:
    x: Tensor
    aux: Tensor


class OutputDict(OrderedDict):  # type: ignore[type-arg]
    """Like Hugging Face's ModelOutput, a mapping with attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


RESULTS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]]
RESULTS = {
    "tuple": (lambda x, a: (x, a, None), lambda r: (r[0], r[1])),
    "list": (lambda x, a: [x, a], lambda r: (r[0], r[1])),
    "dict": (lambda x, a: {"x": x, "deep": {"aux": a}}, lambda r: (r["x"], r["deep"]["aux"])),
    "NamedTuple": (lambda x, a: Output(x, a), lambda r: (r.x, r.aux)),
    "dataclass": (lambda x, a: OutputData(x, a), lambda r: (r.x, r.aux)),
    "frozen dataclass": (lambda x, a: FrozenOutput(x, a), lambda r: (r.x, r.aux)),
    "mapping class": (lambda x, a: OutputDict(x=x, aux=a), lambda r: (r.x, r.aux)),
    "object": (lambda x, a: _Holder(x, a), lambda r: (r.x, r.aux)),
}


class _Holder:
    def __init__(self, x: Tensor, aux: Tensor) -> None:
        self.x, self.aux = x, aux


@pytest.mark.parametrize("name", RESULTS)
def test_results(name: str) -> None:
    """Report B4, C5: the container's type and the gradients survive; terms are counted once."""
    wrap, read = RESULTS[name]
    block = type("Wrapping", (PairBlock,), {"wrap": staticmethod(wrap)})

    class Reader(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            terms = []
            for layer in self.layers:
                result = layer(x)
                assert type(result) is type(wrap(x, x))
                x, aux = read(result)
                assert x.requires_grad
                assert aux.requires_grad
                terms.append(aux)
            assert len(terms) == len(self.layers)
            return self.head(x) + torch.stack(terms).sum()

    compare(lambda: Reader(block, 3))


def test_block_that_returns_its_input() -> None:
    """A result that is one of the arguments stays the same object."""

    class Side(Base):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x, self.mix(x)

    class SideStack(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                same, y = layer(x)
                assert same is x
                x = same + y
            return self.head(x)

    compare(stack_like(SideStack, Side))


def stack_like(stack: type[Stack], block: Callable[[], nn.Module]) -> Callable[[], Stack]:
    """A factory of this kind of stack."""
    return lambda: stack(block, 3)


# --- mutable arguments


class Appending(Base):
    """Appends an auxiliary term to a list that it is given."""

    def forward(self, x: Tensor, terms: list[Tensor]) -> Tensor:
        y = self.mix(x)
        terms.append(y.pow(2).mean())
        return torch.sin(y)


class Recording(Base):
    """Writes an auxiliary term, and a count, into a dict that it is given."""

    def forward(self, x: Tensor, terms: dict[str, Any]) -> Tensor:
        y = self.mix(x)
        terms["count"] = terms.get("count", 0) + 1
        terms[f"term{terms['count']}"] = y.pow(2).mean()
        return torch.sin(y / terms["count"])


class Updating(Base):
    """Changes a list of floats in place and computes with it."""

    def forward(self, x: Tensor, scales: list[float]) -> Tensor:
        scales[0] *= 0.5
        return torch.sin(self.mix(x, scales[0]))


class Popping(Base):
    """Takes a skip connection off a stack, as the up path of a U-Net does."""

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        y = self.mix(x) * skips.pop()
        return torch.sin(y)


def test_list_that_the_blocks_append_to() -> None:
    """Report C5: the list has one term per block after backward too, with its gradient."""

    class Terms(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:  # type: ignore[override]
            x, terms = self.stem(x), []
            for layer in self.layers:
                x = layer(x, terms)
            return self.head(x), terms

    def step(model: nn.Module, index: int) -> tuple[Tensor, int, int]:
        y, terms = model(batch(index))
        before = len(terms)
        loss = y.pow(2).mean() + torch.stack(terms).sum()
        loss.backward()
        return loss.detach(), before, len(terms)

    ours, _ = compare(stack_like(Terms, Appending), step)
    assert ours.values[0][1:] == (3, 3)


def test_dict_that_the_blocks_write_to() -> None:
    """Report C5: a count in a dict argument goes up once per block; the recompute sees the old."""

    class Terms(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:  # type: ignore[override]
            x, terms = self.stem(x), {}
            for layer in self.layers:
                x = layer(x, terms=terms)
            return self.head(x), terms

    def step(model: nn.Module, index: int) -> tuple[Tensor, list[str], int]:
        y, terms = model(batch(index))
        loss = y.pow(2).mean() + terms["term1"] + terms["term3"]
        loss.backward()
        return loss.detach(), sorted(terms), terms["count"]

    ours, _ = compare(stack_like(Terms, Recording), step)
    assert ours.values[0][2] == 3


def test_list_that_the_blocks_change() -> None:
    """The recompute of a block sees the argument as the forward saw it, and leaves it alone."""

    class Scales(Stack):
        def forward(self, x: Tensor) -> tuple[Tensor, list[float]]:  # type: ignore[override]
            x, scales = self.stem(x), [1.0]
            for layer in self.layers:
                x = layer(x, scales)
            return self.head(x), scales

    def step(model: nn.Module, index: int) -> tuple[Tensor, list[float]]:
        y, scales = model(batch(index))
        loss = y.pow(2).mean()
        loss.backward()
        return loss.detach(), scales

    ours, _ = compare(stack_like(Scales, Updating), step)
    assert ours.values[0][1] == [0.125]


def test_list_that_the_blocks_pop_from() -> None:
    """A U-Net's stack of skip connections: popped once each, right one in each recompute."""

    class Skips(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            skips = [torch.cos(x * k) for k in range(1, 4)]
            for layer in self.layers:
                x = layer(x, skips)
            assert not skips
            return self.head(x)

    compare(stack_like(Skips, Popping))


def test_argument_changed_by_the_caller_after_the_call() -> None:
    """The caller reuses one dict of options for the next block: each recompute sees its own."""

    class Options(Base):
        def forward(self, x: Tensor, options: dict[str, float]) -> Tensor:
            return torch.sin(self.mix(x, options["scale"]))

    class OptionStack(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x, options = self.stem(x), {}
            for index, layer in enumerate(self.layers):
                options["scale"] = 1.0 + index
                x = layer(x, options)
            return self.head(x)

    compare(stack_like(OptionStack, Options))


# --- in-place operations


class InPlaceEnd(Base):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(x + self.down(torch.tanh(self.up(x))))


class InPlaceView(Base):
    """The last operation changes a view of the result."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.mix(x)
        y[:, : DIM // 2].mul_(2.0)
        return y


class ViewEnd(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x).reshape(-1, 2, DIM // 2).transpose(1, 2)[..., 0].repeat(1, 2)


@pytest.mark.parametrize("block", [InPlaceEnd, InPlaceView, ViewEnd], ids=lambda b: b.__name__)
@pytest.mark.parametrize("every_n", [1, 2])
def test_in_place_or_view_at_the_end(block: type[nn.Module], every_n: int) -> None:
    """Report B7: the graph is not cut."""
    compare(stack_of(block), every_n=every_n)


def test_result_changed_in_place_by_the_caller() -> None:
    """Report B7: the caller adds to a block's result in place."""

    class Adding(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = layer(x).clone()
                x += 1.0
                x.mul_(0.5)
            return self.head(x)

    compare(stack_like(Adding, InPlaceEnd))


class AddingToInput(Base):
    """`x += position` at the top of a block: the stored input is no longer the input."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.linspace(0, 1, DIM))

    def forward(self, x: Tensor) -> Tensor:
        x += self.position
        return self.mix(x)


class ActivatingInput(Base):
    """An in-place ReLU as the first operation, as in pre-activation ResNets."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.relu_())


class DataAddingToInput(Base):
    """`x.data.add_`, which autograd's version counter does not see."""

    def forward(self, x: Tensor) -> Tensor:
        x.data.add_(1.0)
        return x * 2 + self.down(torch.tanh(self.up(x)))


class WritingToExtra(Base):
    """Changes a second argument, one that needs no gradient, in place."""

    def forward(self, x: Tensor, extra: Tensor | None = None) -> Tensor:
        extra = torch.ones(DIM) if extra is None else extra
        extra.mul_(0.5)
        return torch.sin(self.mix(x, extra.clone()))


IN_PLACE = r"in.?place"


def _right_or_an_error(factory: Callable[[], nn.Module], step: Any = square_step) -> None:
    """Plain training works; ours gives the same gradients or raises what autograd raises."""
    plain = factory()
    step(plain, 0)  # must work, else the comparison means nothing
    with apply_partial_checkpoint(factory()) as handle:
        assert handle.plan.num_recomputed > 0
    model = factory()
    message = ""
    with apply_partial_checkpoint(model):
        try:
            step(model, 0)
        except RuntimeError as error:
            message = str(error)
    if message:
        assert re.search(IN_PLACE, message), message
    else:
        compare(factory, step)


@pytest.mark.parametrize("block", [AddingToInput, ActivatingInput], ids=lambda b: b.__name__)
def test_input_changed_in_place_inside(block: type[nn.Module]) -> None:
    """Report B9: right gradients or the clear error that autograd gives, never silence."""
    _right_or_an_error(stack_of(block))


def test_batch_changed_in_place_inside() -> None:
    """Report B9: the first block changes the batch itself, which needs no gradient."""

    class Direct(Stack):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    _right_or_an_error(stack_like(Direct, AddingToInput))


def test_second_argument_changed_in_place_inside() -> None:
    """Report B9: a running tensor passed from block to block and changed by each."""

    class Running(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x, running = self.stem(x), torch.ones(DIM)
            for layer in self.layers:
                x = layer(x, running)
            return self.head(x)

    _right_or_an_error(stack_like(Running, WritingToExtra))


def test_input_changed_in_place_outside_raises_as_in_plain() -> None:
    """Report B9: where plain autograd raises, ours does too."""

    class Changing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            y = self.layers[0](x)
            x.mul_(2.0)
            return y

    def step(model: nn.Module) -> None:
        model(batch(0)).pow(2).mean().backward()

    with pytest.raises(RuntimeError, match=IN_PLACE):
        step(Changing(InPlaceEnd, 2))
    model = Changing(InPlaceEnd, 2)
    with apply_partial_checkpoint(model), pytest.raises(RuntimeError, match=IN_PLACE):
        step(model)


def test_input_changed_in_place_outside_where_plain_allows_it() -> None:
    """Report B9: plain training does not need the input's values, the recompute does."""

    class Cosine(Base):
        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x + 1.0) + self.up(torch.tanh(x - 1.0))

    class Changing(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            y = self.layers[0](x)
            x.mul_(2.0)
            return self.layers[1](y) + x

    _right_or_an_error(stack_like(Changing, Cosine))


def test_rrelu() -> None:
    """Report B8: the recompute draws the slopes of the forward.

    (Torch gives wrong gradients for RReLU where a saved-tensor hook copies the noise; a recompute
    saves it anew, so it is right.)
    """

    class Leaky(Base):
        def __init__(self) -> None:
            super().__init__()
            self.act = nn.RReLU()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(self.act(self.up(x)))

    compare(stack_of(Leaky))


# --- hooks on a block


def _watch(block: nn.Module, seen: list[str]) -> list[Any]:
    """One hook of each kind; those with a return value edit what passes."""

    def pre(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append("pre")
        return (args[0] * 1.1, *args[1:]), kwargs

    def plain_pre(module: nn.Module, args: Any) -> Any:
        seen.append("plain pre")
        return (args[0] + 0.1,)

    def post(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> Tensor:
        seen.append("post")
        return output * 0.9

    def plain_post(module: nn.Module, args: Any, output: Tensor) -> None:
        seen.append("plain post")

    def backward_pre(module: nn.Module, grad_output: Any) -> Any:
        seen.append("backward pre")
        return (grad_output[0] * 1.2,)

    def backward(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        seen.append("backward")
        return (grad_input[0] * 0.8,)

    return [
        block.register_forward_pre_hook(pre, with_kwargs=True),
        block.register_forward_pre_hook(plain_pre),
        block.register_forward_hook(post, with_kwargs=True),
        block.register_forward_hook(plain_post, always_call=True),
        block.register_full_backward_pre_hook(backward_pre),
        block.register_full_backward_hook(backward),
    ]


KINDS = ["pre", "plain pre", "post", "plain post", "backward pre", "backward"]


@pytest.mark.parametrize("every_n", [1, 2])
def test_hooks_on_a_block_fire_once_and_their_edits_count(every_n: int) -> None:
    """Report C6: every kind of hook, set before applying (factory) or after (step)."""

    def step(model: Stack, index: int) -> tuple[Tensor, list[str]]:
        seen: list[str] = []
        hooks = [hook for layer in model.layers for hook in _watch(layer, seen)]
        loss = square_step(model, index)
        for hook in hooks:
            hook.remove()
        return loss, seen

    ours, _ = compare(stack_of(InPlaceEndFree), step, every_n=every_n)
    for kind in KINDS:
        assert ours.values[0][1].count(kind) == 3


class InPlaceEndFree(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)


def test_hooks_set_before_applying() -> None:
    """Report C6: a hook that was there first stays, and fires once."""
    seen: list[str] = []

    def factory() -> nn.Module:
        model = Stack(InPlaceEndFree, 3)
        for layer in model.layers:
            _watch(layer, seen)
        return model

    def step(model: nn.Module, index: int) -> tuple[Tensor, list[str]]:
        seen.clear()
        return square_step(model, index), list(seen)

    ours, _ = compare(factory, step)
    assert ours.values[0][1].count("backward") == 3


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
def test_legacy_backward_hook() -> None:
    """Report C6: the old, non-full backward hook fires as often as in plain training."""

    def step(model: Stack, index: int) -> tuple[Tensor, int]:
        seen: list[int] = []
        hooks = [
            layer.register_backward_hook(lambda module, gi, go: seen.append(1))
            for layer in model.layers
        ]
        loss = square_step(model, index)
        for hook in hooks:
            hook.remove()
        return loss, len(seen)

    compare(stack_of(InPlaceEndFree), step)


def test_hooks_for_all_modules() -> None:
    """Report C6: a global forward hook sees each block once."""

    def step(model: nn.Module, index: int) -> tuple[Tensor, int]:
        seen: list[nn.Module] = []
        hook = nn.modules.module.register_module_forward_hook(
            lambda module, args, output: seen.append(module)
        )
        loss = model(batch(index)).pow(2).mean()
        hook.remove()
        loss.backward()
        return loss.detach(), sum(isinstance(m, InPlaceEndFree) for m in seen)

    ours, _ = compare(stack_of(InPlaceEndFree), step)
    assert ours.values[0][1] == 3


def test_tensor_hook_inside_a_block_sees_the_gradient() -> None:
    """Report C6: a gradient hook on an inner tensor, set in each forward, edits the gradient."""

    class Clipped(Base):
        def forward(self, x: Tensor) -> Tensor:
            h = torch.tanh(self.up(x))
            if h.requires_grad:
                h.register_hook(lambda g: g.clamp(-1e-3, 1e-3))
            return x + self.down(h)

    compare(stack_of(Clipped))


def test_pre_hook_that_replaces_the_input_by_another_shape() -> None:
    """Report C6: the recompute starts from what the pre-hook returned."""

    def factory() -> nn.Module:
        model = Stack(InPlaceEndFree, 3)
        model.layers[0].register_forward_pre_hook(lambda module, args: (args[0].repeat(2, 1),))
        return model

    compare(factory)


def test_error_in_a_hook_leaves_the_block_usable() -> None:
    """Report C6: after a pre-hook raised, the next step is plain again."""
    model = Stack(InPlaceEndFree, 3)
    with apply_partial_checkpoint(model) as handle:

        def fail(module: nn.Module, args: Any) -> None:
            raise KeyError("hook")

        hook = model.layers[1].register_forward_pre_hook(fail)
        with pytest.raises(KeyError):
            model(batch(0))
        hook.remove()
        names = [block.name for block in handle.plan]
        with executions(model, names) as counts:
            square_step(model, 0)
    assert set(counts.values()) == {2}
    grads = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    square_step(model, 0)
    assert_same([p.grad for p in model.parameters()], grads)
