"""Plain training against checkpointed training, compared bit by bit.

`compare` trains a model twice from one seed, once as it is and once with
`apply_partial_checkpoint`, and holds against each other: what each step returned, every gradient
of every step (one that is missing on one side only is a failure), parameters, buffers, plain
numbers kept as attributes, the names of all instance attributes, optimizer state, and the state
of torch's, Python's and NumPy's generators. It also counts how often each block ran, since a test
in which nothing was recomputed proves nothing.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lightning_ckpt import apply_partial_checkpoint

DIM = 8  # hidden size of all toy models
ROWS = 3  # batch size of all toy models

Step = Callable[[nn.Module, int], Any]


# --- toy models


class MlpBlock(nn.Module):
    """A residual block whose activations outweigh its input; dropout makes the recompute hard."""

    def __init__(self, dim: int = DIM, dropout: float = 0.25) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(torch.tanh(self.up(x))))


class Stack(nn.Module):
    """`stem`, the blocks `layers.0`, `layers.1`, ..., and a `head`."""

    def __init__(self, block: Callable[[], nn.Module] = MlpBlock, num_blocks: int = 4) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.layers = nn.ModuleList(block() for _ in range(num_blocks))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def stack_of(block: Callable[[], nn.Module], num_blocks: int = 3) -> Callable[[], Stack]:
    """A factory of `Stack`s of this block."""
    return lambda: Stack(block, num_blocks)


def batch(index: int, rows: int = ROWS, dim: int = DIM) -> Tensor:
    """The same values (rows, dim) for the same index, without touching the global generator."""
    return torch.randn(rows, dim, generator=torch.Generator().manual_seed(1000 + index))


def square_step(model: nn.Module, index: int) -> Tensor:
    """One forward and backward of a mean square."""
    loss = model(batch(index)).pow(2).mean()
    loss.backward()
    return loss.detach()


# --- counting


@contextmanager
def executions(model: nn.Module, names: Sequence[str]) -> Iterator[Counter[str]]:
    """Count how often the inside of each named block runs, recomputes included.

    The block's own hooks stay outside a recompute, so the count is taken at one of its leaves: the
    one that runs first (a recompute may stop before it reaches the last).
    """
    counts: Counter[str] = Counter()
    probes: dict[str, nn.Module] = {}
    hooks = []
    for name in names:

        def count(module: nn.Module, args: Any, name: str = name) -> None:
            if probes.setdefault(name, module) is module:
                counts[name] += 1

        block = model.get_submodule(name)
        for leaf in block.modules():
            if leaf is not block and not list(leaf.children()):
                hooks.append(leaf.register_forward_pre_hook(count))
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


# --- comparing


@dataclass
class Record:
    """Everything that training leaves behind."""

    values: list[Any] = field(default_factory=list)  # what each step returned
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)
    tensors: dict[str, Tensor] = field(default_factory=dict)  # parameters and buffers
    numbers: dict[str, float] = field(default_factory=dict)  # plain attributes of modules
    attributes: dict[str, list[str]] = field(default_factory=dict)  # names, taken while applied
    optimizer: Any = None
    generators: tuple[Any, ...] = ()
    executions: Counter[str] = field(default_factory=Counter)


def generator_states() -> tuple[Any, ...]:
    """The global generators of torch, Python and NumPy."""
    numpy_state: Any = np.random.get_state()
    return torch.get_rng_state(), random.getstate(), numpy_state[1].tolist(), numpy_state[2]


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, Python and NumPy."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def module_numbers(model: nn.Module) -> dict[str, float]:
    """Plain numbers that modules keep as attributes, by qualified name."""
    return {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, int | float) and key != "training"
    }


def module_attributes(model: nn.Module) -> dict[str, list[str]]:
    """Names of all instance attributes of all modules."""
    return {name: sorted(vars(module)) for name, module in model.named_modules()}


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of these tests."""
    params = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(params, lr=1e-2)


def _run(
    model: nn.Module,
    step: Step,
    steps: int,
    names: Sequence[str],
    optimizer: torch.optim.Optimizer | None,
) -> Record:
    record = Record()
    with executions(model, names) as counts:
        for index in range(steps):
            model.zero_grad(set_to_none=True)
            record.values.append(step(model, index))
            record.grads.append(
                {
                    name: None if p.grad is None else p.grad.clone()
                    for name, p in model.named_parameters()
                }
            )
            if optimizer is not None:
                optimizer.step()
    record.executions = counts
    record.tensors = {
        name: value.detach().clone()
        for source in (
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
        for name, value in source
    }
    record.numbers = module_numbers(model)
    record.attributes = module_attributes(model)
    record.optimizer = None if optimizer is None else optimizer.state_dict()
    record.generators = generator_states()
    return record


def assert_same(ours: Any, plain: Any, where: str = "") -> None:
    """Equality of nested values: tensors bit by bit with dtype, containers with their type."""
    assert type(ours) is type(plain), f"{where}: {type(ours)} is not {type(plain)}"
    if isinstance(plain, Tensor):
        assert ours.dtype == plain.dtype, f"{where}: {ours.dtype} is not {plain.dtype}"
        assert ours.shape == plain.shape, f"{where}: {ours.shape} is not {plain.shape}"
        assert torch.equal(ours, plain), f"{where}: off by {_distance(ours, plain)}"
    elif isinstance(plain, Mapping):
        assert list(ours) == list(plain), f"{where}: {list(ours)} is not {list(plain)}"
        for key in plain:
            assert_same(ours[key], plain[key], f"{where}.{key}")
    elif isinstance(plain, list | tuple):
        assert len(ours) == len(plain), f"{where}: length {len(ours)} is not {len(plain)}"
        for index, (one, other) in enumerate(zip(ours, plain, strict=True)):
            assert_same(one, other, f"{where}[{index}]")
    elif is_dataclass(plain):
        for entry in fields(plain):
            name = entry.name
            assert_same(getattr(ours, name), getattr(plain, name), f"{where}.{name}")
    else:
        assert ours == plain, f"{where}: {ours} is not {plain}"


def _distance(ours: Tensor, plain: Tensor) -> float:
    return float((ours.double() - plain.double()).abs().max())


def assert_counts(
    ours: Counter[str], plain: Counter[str], plan: Any, ratio: int | None = 2
) -> None:
    """Recomputed blocks ran `ratio` times as often as plain ones (None: more often), kept once."""
    for block in plan:
        expected = plain[block.name]
        if block.action == "keep":
            assert ours[block.name] == expected, f"{block.name} is kept, yet ran again"
        elif ratio is not None:
            assert ours[block.name] == ratio * expected, (
                f"{block.name} ran {ours[block.name]} times, plain {expected}, ratio {ratio}"
            )
    recomputed = list(plan.recomputed)
    if not recomputed:
        return
    assert sum(ours[n] for n in recomputed) > sum(plain[n] for n in recomputed), (
        "nothing was recomputed"
    )


def compare(
    factory: Callable[[], nn.Module],
    step: Step = square_step,
    *,
    every_n: int = 1,
    layers: Any = None,
    steps: int = 3,
    ratio: int | None = 2,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = adam,
    seed: int = 0,
    plan: Any = None,
) -> tuple[Record, Record]:
    """Train plain and checkpointed and hold all that is left behind against each other.

    Args:
        factory: makes the model; called once for each run, after seeding.
        step: forward and backward of step `index`, returns a value that is compared too.
        every_n, layers, plan: passed to `apply_partial_checkpoint`.
        ratio: how many times as often as in plain training a recomputed block runs; None when
            only "more often" can be said.
        optimizer: makes the optimizer, None for none.

    Returns:
        The records of the checkpointed and of the plain run.
    """
    seed_all(seed)
    model = factory()
    states = generator_states()
    with apply_partial_checkpoint(model, every_n=every_n, layers=layers, plan=plan) as handle:
        assert_same(generator_states(), states, "generators after applying")
        made = None if optimizer is None else optimizer(model)
        names = [block.name for block in handle.plan]
        ours = _run(model, step, steps, names, made)
        followed = handle.plan

    seed_all(seed)
    model = factory()
    made = None if optimizer is None else optimizer(model)
    plain = _run(model, step, steps, names, made)

    assert any(grad is not None for grads in plain.grads for grad in grads.values()) or (
        optimizer is None
    ), "the plain run has no gradient, so the comparison would be empty"
    assert_counts(ours.executions, plain.executions, followed, ratio)
    for entry in fields(Record):
        if entry.name != "executions":
            assert_same(getattr(ours, entry.name), getattr(plain, entry.name), entry.name)
    return ours, plain


def learn(model: nn.Module, *inputs: Any, **kwargs: Any) -> list[Tensor | None]:
    """Gradients of the mean square of one call, by parameter order; grads are cleared after."""
    model(*inputs, **kwargs).pow(2).mean().backward()
    grads = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return grads
