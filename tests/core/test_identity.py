"""Nothing that a user can see of a model changes, and removal leaves no trace."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import (
    DIM,
    MlpBlock,
    Stack,
    assert_same,
    batch,
    compare,
    executions,
    learn,
    module_attributes,
    square_step,
    stack_of,
)
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_ckpt import apply_partial_checkpoint, find_blocks

# --- names, classes, representation


def view(model: nn.Module) -> dict[str, Any]:
    """What tools read off a model."""
    return {
        "keys": list(model.state_dict()),
        "parameters": [name for name, _ in model.named_parameters()],
        "buffers": [name for name, _ in model.named_buffers()],
        "modules": [name for name, _ in model.named_modules()],
        "types": [type(m).__name__ for m in model.modules()],
        "qualnames": [type(m).__qualname__ for m in model.modules()],
        "homes": [type(m).__module__ for m in model.modules()],
        "docs": [type(m).__doc__ for m in model.modules()],
        "repr": repr(model),
        "attributes": module_attributes(model),
        "children": [[n for n, _ in m.named_children()] for m in model.modules()],
    }


@pytest.mark.parametrize("every_n", [1, 2])
def test_names_and_representation_stay(every_n: int) -> None:
    """Report H1, H3, pitfall 24: before, during (with a step) and after."""
    model = Stack()
    before = view(model)
    with apply_partial_checkpoint(model, every_n=every_n):
        assert view(model) == before
        square_step(model, 0)
        assert view(model) == before
    assert view(model) == before


def test_class_checks_stay() -> None:
    """Report H3: isinstance, super() chains, class attributes, methods and properties."""

    class Fancy(MlpBlock):
        width = 3

        @property
        def area(self) -> int:
            return self.width * DIM

        @staticmethod
        def helper() -> str:
            return "static"

        @classmethod
        def kind(cls) -> str:
            return cls.__name__

        def forward(self, x: Tensor) -> Tensor:
            assert type(self).__name__ == "Fancy"
            return super().forward(x)

    model = Stack(Fancy, 3)
    with apply_partial_checkpoint(model):
        block = model.layers[0]
        assert isinstance(block, Fancy)
        assert isinstance(block, MlpBlock)
        assert issubclass(type(block), Fancy)
        assert (block.area, block.helper(), block.kind()) == (24, "static", "Fancy")
        block.extra = 5  # setting an attribute works, and stays
        Fancy.width = 4
        assert block.area == 32
        square_step(model, 0)
    assert block.extra == 5
    assert type(block) is Fancy


def test_blocks_of_one_class_share_one_class_while_applied() -> None:
    """Tools that group modules by `type` see one group, as before."""
    model = Stack()
    with apply_partial_checkpoint(model):
        assert len({type(layer) for layer in model.layers}) == 1


def test_find_blocks_is_the_same_while_applied() -> None:
    """Names, classes and order; by default and by class."""
    model = Stack()
    before = find_blocks(model)
    assert [block.name for block in before] == [f"layers.{i}" for i in range(4)]
    with apply_partial_checkpoint(model, every_n=2):
        assert find_blocks(model) == before
        assert find_blocks(model, MlpBlock) == before
        assert find_blocks(model, "MlpBlock") == before
        assert find_blocks(model, ["layers.*"]) == before


def test_state_dict_loads_strictly_both_ways() -> None:
    """Report H1: files of a checkpointed and of a plain model are interchangeable."""
    plain, ours = Stack(), Stack()
    with apply_partial_checkpoint(ours):
        plain.load_state_dict(ours.state_dict(), strict=True)
        ours.load_state_dict(plain.state_dict(), strict=True)
    assert_same(dict(ours.state_dict()), dict(plain.state_dict()))


def test_signature_of_forward_stays() -> None:
    """Tools that look at the arguments of `forward` (datasets, tracers) see the user's."""
    import inspect

    model = Stack()
    before = inspect.signature(model.layers[0].forward)
    with apply_partial_checkpoint(model):
        assert inspect.signature(model.layers[0].forward) == before


def test_handle_and_plan() -> None:
    """The handle holds the plan: name, class and action of each block, in order."""
    model = Stack()
    handle = apply_partial_checkpoint(model, every_n=3)
    plan = handle.plan
    assert [(b.name, b.class_name, b.action, b.offload) for b in plan] == [
        ("layers.0", "MlpBlock", "recompute", None),
        ("layers.1", "MlpBlock", "keep", None),
        ("layers.2", "MlpBlock", "keep", None),
        ("layers.3", "MlpBlock", "recompute", None),
    ]
    assert (len(plan), plan.num_recomputed, plan.every_n) == (4, 2, 3)
    assert isinstance(plan.to_dict(), dict)
    with pytest.raises((AttributeError, TypeError)):  # frozen
        plan.every_n = 1
    handle.remove()
    assert handle.plan == plan
    pickle.loads(pickle.dumps(plan))


# --- copies


def _zero(module: nn.Module) -> None:
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()


def test_zeroed_copy_is_an_identity_map() -> None:
    """Report H4: a copy calls its own forward with its own weights, and is plain."""
    model = Stack()
    with apply_partial_checkpoint(model):
        square_step(model, 0)
        block = copy.deepcopy(model.layers[0])
        _zero(block)
        x = batch(0).requires_grad_()
        assert torch.equal(block(x), x)
        assert type(block) is MlpBlock
        twin = copy.deepcopy(model)
        assert [type(m) for m in twin.modules()] == [type(m) for m in Stack().modules()]
        with executions(twin, ["layers.0"]) as counts:
            square_step(twin, 0)
        assert counts["layers.0"] == 1, "the copy is plain"
        with executions(model, ["layers.0"]) as counts:
            square_step(model, 0)
        assert counts["layers.0"] == 2, "the original is still checkpointed"
    apply_partial_checkpoint(twin).remove()  # a copy can be checkpointed itself


def test_copy_survives_removal_and_gives_the_same_gradients() -> None:
    """Report H4, H5: the copy of an EMA average does not depend on the original."""
    model = Stack(lambda: MlpBlock(dropout=0.0))
    handle = apply_partial_checkpoint(model)
    twin = copy.deepcopy(model)
    shallow = copy.copy(model.layers[0])
    handle.remove()
    assert type(shallow) is MlpBlock
    assert_same(learn(twin, batch(0)), learn(model, batch(0)))


def test_averaged_model() -> None:
    """Report H5: torch's AveragedModel of a checkpointed model is plain and averages it."""
    from torch.optim.swa_utils import AveragedModel

    model = Stack()
    with apply_partial_checkpoint(model):
        average = AveragedModel(model)
        assert type(average.module.layers[0]) is MlpBlock
        average.update_parameters(model)
        assert_same(dict(average.module.state_dict()), dict(model.state_dict()))


SOURCE = '''
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, dim=8):
        super().__init__()
        self.up = nn.Linear(dim, dim)
        self.cache = {"big": torch.zeros(100)}

    def forward(self, x):
        return x + torch.tanh(self.up(x))

class StatefulBlock(Block):
    """Leaves its cache out of a pickle."""
    def __getstate__(self):
        state = self.__dict__.copy()
        state["cache"] = "dropped"
        return state

    def __setstate__(self, state):
        self.__dict__.update(state)
        self.cache = "restored"

class ReducedBlock(Block):
    def __reduce__(self):
        return rebuild, (self.up.weight.detach().clone(), self.up.bias.detach().clone())

def rebuild(weight, bias):
    block = ReducedBlock()
    with torch.no_grad():
        block.up.weight.copy_(weight)
        block.up.bias.copy_(bias)
    block.cache = "rebuilt"
    return block

class CopiedBlock(Block):
    def __deepcopy__(self, memo):
        other = type(self)()
        other.load_state_dict(self.state_dict())
        other.cache = "copied"
        memo[id(self)] = other
        return other

class ReducedExBlock(Block):
    def __reduce_ex__(self, protocol):
        return rebuild_ex, (type(self).__name__, self.state_dict())

def rebuild_ex(name, state):
    assert name == "ReducedExBlock", name
    block = ReducedExBlock()
    block.load_state_dict(state)
    block.cache = "rebuilt"
    return block

class Model(nn.Module):
    def __init__(self, block=Block):
        super().__init__()
        self.layers = nn.ModuleList(block() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
'''


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module file of its own, so that another process can import the classes."""
    (tmp_path / "toy_blocks.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "toy_blocks", raising=False)
    import toy_blocks  # type: ignore[import-not-found]

    yield toy_blocks
    sys.modules.pop("toy_blocks", None)


def test_pickle_and_torch_save_load_without_this_package(toy: Any, tmp_path: Path) -> None:
    """Report A16, H4: files are plain; another process without the package reads them."""
    model = toy.Model()
    with apply_partial_checkpoint(model, every_n=2):
        square_step(model, 0)
        model.zero_grad(set_to_none=True)
        with open(tmp_path / "model.pickle", "wb") as file:
            pickle.dump(model, file)
        torch.save(model, tmp_path / "model.pt")
        torch.save(model.layers[0], tmp_path / "block.pt")
        expected = model(batch(0)).sum().item()
    script = """
        import pickle, sys
        sys.modules["lightning_ckpt"] = None  # any import of it fails
        import torch, toy_blocks
        with open("model.pickle", "rb") as file:
            models = [pickle.load(file), torch.load("model.pt", weights_only=False)]
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1000))
        for model in models:
            assert [type(m) for m in model.layers] == [toy_blocks.Block] * 3
            loss = model(x).sum()
            loss.backward()
            print(loss.item())
        assert type(torch.load("block.pt", weights_only=False)) is toy_blocks.Block
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert [float(line) for line in done.stdout.split()] == [expected] * 2


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol(toy: Any, protocol: int) -> None:
    """Report A16: spawned workers and old tools use different protocols."""
    model = toy.Model()
    with apply_partial_checkpoint(model):
        twin = pickle.loads(pickle.dumps(model, protocol))
    assert type(twin.layers[0]) is toy.Block


@pytest.mark.parametrize(
    ("name", "pickled", "copied"),
    [
        ("StatefulBlock", "restored", "restored"),
        ("ReducedBlock", "rebuilt", "rebuilt"),
        ("CopiedBlock", None, "copied"),
        ("ReducedExBlock", "rebuilt", "rebuilt"),
    ],
)
def test_copy_protocol_of_the_class_is_honoured(
    toy: Any, name: str, pickled: str | None, copied: str
) -> None:
    """`__getstate__`, `__reduce__`, `__reduce_ex__`, `__deepcopy__` do what they do in plain."""
    block = getattr(toy, name)
    model = toy.Model(block)
    with apply_partial_checkpoint(model):
        twin = copy.deepcopy(model)
        loaded = pickle.loads(pickle.dumps(model))
    for other, cache in ((twin, copied), (loaded, pickled)):
        assert type(other.layers[0]) is block
        if cache is not None:
            assert other.layers[0].cache == cache
        assert_same(dict(other.state_dict()), dict(model.state_dict()))
    assert model.layers[0].cache["big"].shape == (100,)


def test_restored_plain_class_can_be_loaded_under_the_swap(toy: Any) -> None:
    """A pickle that was written plain loads while another model is checkpointed."""
    data = pickle.dumps(toy.Model())
    with apply_partial_checkpoint(toy.Model()):
        assert type(pickle.loads(data).layers[0]) is toy.Block


# --- odd classes


class Registered(nn.Module):
    """`__init_subclass__` has a required argument, and keeps a list of subclasses."""

    subclasses: list[str] = []

    def __init_subclass__(cls, *, tag: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        Registered.subclasses.append(tag)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class RegisteredBlock(Registered, tag="block"):
    """A leaf of that family."""


class CountingMeta(type):
    """A metaclass that needs an argument and counts its classes."""

    made: list[str] = []

    def __new__(mcs, name: str, bases: Any, space: Any, *, tag: str) -> Any:
        CountingMeta.made.append(name)
        return super().__new__(mcs, name, bases, space)

    def __init__(cls, name: str, bases: Any, space: Any, *, tag: str) -> None:
        super().__init__(name, bases, space)


class MetaBlock(nn.Module, metaclass=CountingMeta, tag="meta"):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.up(x))


class SlottedBlock(MlpBlock):
    """A class with `__slots__`."""

    __slots__ = ("spare",)


class GuardedBlock(MlpBlock):
    """Refuses attributes that it does not know."""

    def __setattr__(self, name: str, value: Any) -> None:
        known = {"up", "dropout", "down", "training", "_parameters", "_modules", "_buffers"}
        if "_modules" in self.__dict__ and name not in known:
            raise AttributeError(f"unknown attribute {name}")
        super().__setattr__(name, value)


class CallingBlock(MlpBlock):
    """Overrides `__call__`, as Hugging Face's layers do."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs) * 0.5


ODD = [RegisteredBlock, MetaBlock, SlottedBlock, CallingBlock]


@pytest.mark.parametrize("block", ODD, ids=lambda b: b.__name__)
def test_odd_classes(block: type[nn.Module]) -> None:
    """Required arguments of `__init_subclass__` or of a metaclass, slots, `__call__`."""
    registered, made = list(Registered.subclasses), list(CountingMeta.made)
    compare(stack_of(block))
    with apply_partial_checkpoint(Stack(block, 3)) as handle:
        assert {entry.class_name for entry in handle.plan} == {block.__name__}
    assert Registered.subclasses == registered, "the user's registry got a class of ours"
    assert CountingMeta.made == made


def test_subclass_lookup_sees_no_class_of_ours() -> None:
    """A registry that walks `__subclasses__()` by name finds the user's class only once."""
    names = [cls.__name__ for cls in _all_subclasses(MlpBlock)]
    model = Stack(SlottedBlock, 3)
    with apply_partial_checkpoint(model):
        pass
    del model
    after = [cls for cls in _all_subclasses(MlpBlock) if cls.__name__ not in names]
    assert after == []


def _all_subclasses(cls: type) -> list[type]:
    return [s for child in cls.__subclasses__() for s in (child, *_all_subclasses(child))]


# --- forward replaced on the instance


def _doubled(block: nn.Module) -> Callable[[Tensor], Tensor]:
    original = block.forward

    def forward(x: Tensor) -> Tensor:
        return 2 * original(x)

    return forward


def test_instance_forward_replaced_before() -> None:
    """The user's replacement is what runs, is checkpointed, and is still there afterwards."""

    def factory() -> nn.Module:
        model = Stack()
        for layer in model.layers:
            layer.forward = _doubled(layer)
        return model

    compare(factory)
    model = factory()
    mine = model.layers[0].forward
    with apply_partial_checkpoint(model):
        square_step(model, 0)
    assert model.layers[0].__dict__["forward"] is mine


def test_instance_forward_replaced_after() -> None:
    """A replacement while ours is applied runs, is right, and survives removal."""
    plain, model = Stack(lambda: MlpBlock(dropout=0.0)), Stack(lambda: MlpBlock(dropout=0.0))
    model.load_state_dict(plain.state_dict())
    for layer in plain.layers:
        layer.forward = _doubled(layer)
    handle = apply_partial_checkpoint(model)
    for layer in model.layers:
        layer.forward = _doubled(layer)
    replaced = model.layers[0].__dict__["forward"]
    with executions(model, ["layers.0"]) as counts:
        grads = learn(model, batch(0))
    assert_same(grads, learn(plain, batch(0)))
    assert counts["layers.0"] == 2
    handle.remove()
    assert model.layers[0].__dict__["forward"] is replaced
    assert_same(learn(model, batch(0)), learn(plain, batch(0)))
    assert type(model.layers[0]) is MlpBlock


def test_instance_forward_given_back_by_the_user() -> None:
    """Save, replace, restore, as timers and tracers do."""
    model = Stack()
    keys = set(vars(model.layers[0]))
    with apply_partial_checkpoint(model):
        model.layers[0].forward = _doubled(model.layers[0])
        del model.layers[0].forward
        with executions(model, ["layers.0"]) as counts:
            square_step(model, 0)
        assert counts["layers.0"] == 2
    assert set(vars(model.layers[0])) == keys


# --- removal


def _snapshot(model: nn.Module) -> tuple[list[type], dict[str, list[str]], list[int]]:
    hooks = [
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks)
        for m in model.modules()
    ]
    return [type(m) for m in model.modules()], module_attributes(model), hooks


class Explosive(MlpBlock):
    """Raises in the n-th execution."""

    countdown = 10**9

    def forward(self, x: Tensor) -> Tensor:
        Explosive.countdown -= 1
        if Explosive.countdown == 0:
            raise KeyboardInterrupt
        return torch.sin(super().forward(x))


@pytest.mark.parametrize("moment", [2, 5], ids=["forward", "backward"])
def test_removal_after_an_exception_in_a_step(moment: int) -> None:
    """Pitfall 45: an interrupt in the middle of a forward or of a recompute leaves no trace."""
    model = Stack(Explosive, 3)
    before = _snapshot(model)
    generators = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
    handle = apply_partial_checkpoint(model)
    Explosive.countdown = moment
    with pytest.raises(KeyboardInterrupt):
        square_step(model, 0)
    Explosive.countdown = 10**9
    handle.remove()
    assert _snapshot(model) == before
    assert (torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")) == generators
    model.zero_grad(set_to_none=True)
    with executions(model, ["layers.0"]) as counts:
        square_step(model, 0)
    assert counts["layers.0"] == 1
    compare(stack_of(Explosive))  # and nothing global is left over


def test_exception_in_the_with_block_removes() -> None:
    """The context manager removes whatever happens."""
    model = Stack()
    before = _snapshot(model)
    with pytest.raises(ZeroDivisionError), apply_partial_checkpoint(model):
        raise ZeroDivisionError
    assert _snapshot(model) == before


def test_remove_twice_and_between_forward_and_backward() -> None:
    """A second removal does nothing; a graph that is alive at removal still gives gradients."""
    plain = Stack(lambda: MlpBlock(dropout=0.0))
    model = copy.deepcopy(plain)
    handle = apply_partial_checkpoint(model)
    loss = model(batch(0)).pow(2).mean()
    handle.remove()
    handle.remove()
    loss.backward()
    assert_same([p.grad for p in model.parameters()], learn(plain, batch(0)))
    assert type(model.layers[0]) is MlpBlock


def test_apply_between_forward_and_backward() -> None:
    """A plain graph that is alive when ours is applied is not disturbed."""
    plain = Stack(lambda: MlpBlock(dropout=0.0))
    model = copy.deepcopy(plain)
    loss = model(batch(0)).pow(2).mean()
    with apply_partial_checkpoint(model):
        loss.backward()
    assert_same([p.grad for p in model.parameters()], learn(plain, batch(0)))


def test_apply_twice_never_doubles() -> None:
    """Report I1, pitfall 14: at most one recompute per block, however often it is applied."""
    model = Stack()
    before = _snapshot(model)
    first = apply_partial_checkpoint(model)
    try:
        second = apply_partial_checkpoint(model)
    except (ValueError, RuntimeError):
        second = None  # refusing is one way never to double
    with executions(model, [b.name for b in first.plan]) as counts:
        square_step(model, 0)
    assert set(counts.values()) == {2}
    if second is not None:
        second.remove()
    first.remove()
    assert _snapshot(model) == before


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_handles_removed_in_any_order(first_out: int) -> None:
    """Report I1: whatever the order, the model ends plain, and never recomputes twice meanwhile."""
    model = Stack()
    before = _snapshot(model)
    handles = [apply_partial_checkpoint(model, layers="layers.[01]")]
    handles.append(apply_partial_checkpoint(model, layers="layers.[23]"))
    names = [f"layers.{i}" for i in range(4)]
    with executions(model, names) as counts:
        square_step(model, 0)
    assert [counts[n] for n in names] == [2, 2, 2, 2]
    handles[first_out].remove()
    with executions(model, names) as counts:
        square_step(model, 0)
    assert [counts[n] for n in names] == ([1, 1, 2, 2] if first_out == 0 else [2, 2, 1, 1])
    handles[1 - first_out].remove()
    assert _snapshot(model) == before


@pytest.mark.parametrize("first_out", [0, 1])
def test_two_handles_over_the_same_blocks(first_out: int) -> None:
    """Report I1: overlapping handles end plain in any order of removal, or are refused."""
    model = Stack()
    before = _snapshot(model)
    handles = [apply_partial_checkpoint(model, every_n=1)]
    try:
        handles.append(apply_partial_checkpoint(model, every_n=2))
    except (ValueError, RuntimeError):
        pass
    else:
        handles.pop(first_out).remove()
    for handle in handles:
        handle.remove()
    assert _snapshot(model) == before


class OuterBlock(nn.Module):
    """Holds another block."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = MlpBlock()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * 2


@pytest.mark.parametrize("order", [(OuterBlock, MlpBlock), (MlpBlock, OuterBlock)])
def test_two_handles_that_would_nest(order: tuple[type, type]) -> None:
    """Semantics: never a block inside a block; it is refused, and the first plan stays."""
    model = Stack(OuterBlock, 3)
    before = _snapshot(model)
    names = [f"layers.{i}.inner" for i in range(3)]
    handles = [apply_partial_checkpoint(model, layers=order[0])]
    with pytest.raises(ValueError, match="nests with"):
        apply_partial_checkpoint(model, layers=order[1])
    with executions(model, names) as counts:
        square_step(model, 0)
    assert [counts[name] for name in names] == [2, 2, 2]
    for handle in handles:
        handle.remove()
    assert _snapshot(model) == before


def test_apply_after_remove_works_again() -> None:
    """Report I1: many applications over one model's life."""
    model = Stack()
    for every_n in (1, 2, 1):
        with apply_partial_checkpoint(model, every_n=every_n) as handle:
            with executions(model, [b.name for b in handle.plan]) as counts:
                square_step(model, 0)
            assert sum(counts.values()) == len(handle.plan) + handle.plan.num_recomputed


def test_block_taken_out_of_the_model_meanwhile_is_restored() -> None:
    """A pruned block gets its class back as well."""
    model = Stack()
    handle = apply_partial_checkpoint(model)
    pruned = model.layers[3]
    model.layers = model.layers[:3]
    handle.remove()
    assert type(pruned) is MlpBlock
    assert type(model.layers[0]) is MlpBlock


# --- other people's classes and wrappers


@pytest.mark.usefixtures("gloo")
def test_fully_shard_over_ours_and_ours_over_fully_shard() -> None:
    """Report A8, A9: removal keeps FSDP2's class; the recompute stays inside its hooks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    mesh = init_device_mesh("cpu", (1,))

    def shard(model: Stack) -> None:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)

    plain = Stack(lambda: MlpBlock(dropout=0.0))
    over, under = copy.deepcopy(plain), copy.deepcopy(plain)
    shard(plain)
    expected = [g.full_tensor() for g in learn(plain, batch(0))]  # type: ignore[union-attr]

    handle = apply_partial_checkpoint(over)
    shard(over)
    shard(under)
    other = apply_partial_checkpoint(under)
    for model in (over, under):
        with executions(model, ["layers.0", "layers.3"]) as counts:
            grads = learn(model, batch(0))
        assert set(counts.values()) == {2}
        assert_same([g.full_tensor() for g in grads], expected)  # type: ignore[union-attr]
    handle.remove()
    other.remove()
    for model in (over, under):
        assert all(isinstance(layer, FSDPModule) for layer in model.layers)
        assert [type(m).__name__ for m in model.modules()] == [
            type(m).__name__ for m in plain.modules()
        ]
        assert [type(m).__mro__[1:] for m in model.layers] == [
            type(m).__mro__[1:] for m in plain.layers
        ], "our class is still below FSDP's"
        with executions(model, ["layers.0"]) as counts:
            grads = learn(model, batch(0))
        assert counts["layers.0"] == 1
        assert_same([g.full_tensor() for g in grads], expected)  # type: ignore[union-attr]


@pytest.mark.usefixtures("gloo")
def test_fully_shard_with_bf16_parameters() -> None:
    """Report A9: the input cast of FSDP2's pre-forward holds in the recompute."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    mesh = init_device_mesh("cpu", (1,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    seen: list[torch.dtype] = []

    class Asking(MlpBlock):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.up.weight.dtype)
            seen.append(x.dtype)
            return super().forward(x)

    def grads(checkpointed: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = Stack(Asking, 3)
        handle = apply_partial_checkpoint(model) if checkpointed else None
        for layer in model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        torch.manual_seed(1)
        result = [g.full_tensor() for g in learn(model, batch(0))]  # type: ignore[union-attr]
        if handle is not None:
            handle.remove()
        return result

    expected = grads(checkpointed=False)
    assert len(seen) == 3 * 2
    seen.clear()
    assert_same(grads(checkpointed=True), expected)
    assert len(seen) == 3 * 4
    assert set(seen) == {torch.bfloat16}


def test_checkpoint_wrapper_is_refused() -> None:
    """Report A12: blocks inside torch's wrapper are a clear error, and nothing is swapped."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = Stack()
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
    before = _snapshot(model)
    for layers in (None, MlpBlock, "layers.*"):
        with pytest.raises(ValueError, match="checkpoint_wrapper"):
            apply_partial_checkpoint(model, layers=layers)
        assert _snapshot(model) == before


def test_composable_checkpoint_is_refused() -> None:
    """Report A12: so are blocks under the composable API."""
    from torch.distributed._composable import checkpoint as composable

    model = Stack()
    composable(model.layers[2])
    before = _snapshot(model)
    with pytest.raises(ValueError, match=r"layers\.2"):
        apply_partial_checkpoint(model)
    assert _snapshot(model) == before


def test_block_that_checkpoints_a_part_of_itself() -> None:
    """A block whose own forward calls `checkpoint` goes on working."""

    class Inner(MlpBlock):
        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(lambda t: torch.tanh(self.up(t)), x, use_reentrant=False)
            return x + self.down(self.dropout(h))

    compare(stack_of(Inner), ratio=None)


@pytest.mark.parametrize("reentrant", [True, False])
def test_model_that_checkpoints_its_blocks_by_hand(reentrant: bool) -> None:
    """Report A12, pitfall 14: right gradients, one replay of each layer, and a word about it."""

    class ByHand(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return self.head(x)

    model = ByHand(MlpBlock, 3)
    torch.manual_seed(3)
    expected = learn(model, batch(0))
    with apply_partial_checkpoint(model) as handle:
        torch.manual_seed(3)
        with (
            pytest.warns(UserWarning, match="MlpBlock is called inside of a torch.utils.checkp"),
            executions(model, handle.plan.recomputed) as counts,
        ):
            assert_same(learn(model, batch(0)), expected)
    assert set(counts.values()) == {2}


def test_transformer_encoder_evaluation_path() -> None:
    """Report H3: nn.TransformerEncoder inspects its first layer; eval outputs stay as they were."""
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's word on nested tensors
        model = nn.TransformerEncoder(layer, 3)
    x = torch.randn(2, 5, 16)
    mask = torch.tensor([[False] * 5, [False] * 3 + [True] * 2])

    def outputs() -> list[Tensor]:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return [model(x), model(x, src_key_padding_mask=mask)]

    model.eval()
    expected = outputs()
    with apply_partial_checkpoint(model) as handle:
        assert [b.name for b in handle.plan] == ["layers.0", "layers.1", "layers.2"]
        assert_same(outputs(), expected)


def test_save_to_a_buffer_while_a_graph_is_alive() -> None:
    """Report H4: saving between forward and backward writes a plain model."""
    model = Stack()
    with apply_partial_checkpoint(model):
        loss = model(batch(0)).sum()
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
        loss.backward()
    assert type(twin.layers[0]) is MlpBlock
