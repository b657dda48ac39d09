"""What offload moves, and that training is what it was: on the disk, which is real on a CPU."""

import copy
import gc
import pickle
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers import MlpBlock, Stack, assert_same
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import set_checkpoint_early_stop

from lightning_ckpt import apply_partial_checkpoint
from lightning_ckpt.core.handle import Handle
from lightning_ckpt.core.memory import track_peak
from lightning_ckpt.core.offload import Offloader, OffloadReport
from lightning_ckpt.core.offload.config import OffloadConfig

ROWS, DIM = 3, 8


def disk(**values: Any) -> OffloadConfig:
    return OffloadConfig(**{"target": "disk", "min_bytes": 0, **values})


def offloader_of(handle: Handle) -> Offloader:
    assert handle.offloader is not None
    return handle.offloader


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(seed))


Step = Callable[[nn.Module], Any]


def square(model: nn.Module) -> Any:
    model(inputs()).pow(2).mean().backward()


def train(model: nn.Module, step: Step, steps: int = 3) -> list[Any]:
    """All gradients, and the parameters at the end."""
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    seen: list[Any] = []
    for _ in range(steps):
        optimizer.zero_grad()
        seen.append(step(model))
        seen.append({n: None if p.grad is None else p.grad.clone() for n, p in _named(model)})
        optimizer.step()
    return [*seen, {n: p.detach().clone() for n, p in _named(model)}]


def _named(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    return list(model.named_parameters())


def same_as_plain(
    model: nn.Module, step: Step = square, offload: Any = None, every_n: int = 1, steps: int = 3
) -> OffloadReport:
    """Train plainly and offloaded from the same weights; all must be equal bit by bit.

    Once as it comes, when copies may still be under way where backward asks for their tensors, and
    once with all copies out ended after each forward.
    """
    plain = train(copy.deepcopy(model), step, steps)
    for is_patient in (False, True):
        other = copy.deepcopy(model)
        with apply_partial_checkpoint(other, every_n, offload or disk()) as handle:
            offloader = offloader_of(handle)
            if is_patient:
                for layer in other.modules():
                    layer.register_forward_hook(lambda *_, o=offloader: o.settle() and None)
            assert_same(train(other, step, steps), plain)
            report = offloader.report()
    assert report.in_bytes > 0, "nothing came back, so nothing was tested"
    return report


# --- training is what it was


@pytest.mark.parametrize("scope", ["inputs", "kept", "all"])
@pytest.mark.parametrize(("keep_last", "prefetch"), [(0, 0), (0, 2), (1, 1), (1, 3)])
def test_same_training(scope: Any, keep_last: int, prefetch: int) -> None:
    report = same_as_plain(
        Stack(num_blocks=5),
        offload=disk(scope=scope, keep_last=keep_last, prefetch=prefetch),
        every_n=2,
    )
    if scope == "inputs":  # blocks 0, 2 and 4 hold their inputs
        assert report.out_bytes == report.in_bytes == 3 * (3 - keep_last) * ROWS * DIM * 4
        assert report.out_link.num_bytes == report.in_link.num_bytes == report.out_bytes
        assert 0 < report.out_seconds < 10
        assert 0 < report.in_seconds < 10


@pytest.mark.parametrize("scope", ["inputs", "kept", "all"])
def test_accumulation_autocast_and_several_losses(scope: Any) -> None:
    def step(model: nn.Module) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            first, second = model(inputs(1)), model(inputs(2))
        (first + second).float().mean().backward()
        with torch.autocast("cpu", torch.bfloat16):
            third, fourth = model(inputs(3)), model(inputs(4))
        third.float().pow(2).sum().backward()
        fourth.float().sum().backward()
        loss = model(inputs(5)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return loss.detach()

    same_as_plain(Stack(), step, disk(scope=scope), every_n=2)


@pytest.mark.parametrize("scope", ["inputs", "all"])
def test_second_order(scope: Any) -> None:
    def step(model: nn.Module) -> Any:
        x = inputs().requires_grad_()
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()
        return gradient.detach()

    same_as_plain(Stack(lambda: MlpBlock(dropout=0.0)), step, disk(scope=scope), every_n=2)


def test_partial_backward() -> None:
    def step(model: Any) -> Any:
        x = model.stem(inputs())
        for layer in model.layers:
            x = layer(x)
        loss = model.head(x).sum()
        loss.backward(inputs=list(model.layers[2].parameters()), retain_graph=True)
        loss.backward(inputs=list(model.layers[1].parameters()))

    same_as_plain(Stack(), step, disk(prefetch=2))


def test_a_tower_that_backward_reaches_in_another_order() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.ModuleList(MlpBlock() for _ in range(3))
            self.right = nn.ModuleList(MlpBlock() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            left, right = x, x.flip(0)
            for block in self.left:
                left = block(left)
            for block in self.right:
                right = block(right)
            return left * right

    same_as_plain(Towers(), offload=disk(keep_last=0, prefetch=2))


def test_backward_in_another_thread() -> None:
    def step(model: nn.Module) -> Any:
        loss = model(inputs()).sum()
        thread = threading.Thread(target=loss.backward)
        thread.start()
        thread.join()

    same_as_plain(Stack(), step, disk(scope="all", keep_last=0), every_n=2)


def test_several_threads_at_once() -> None:
    model = Stack(lambda: MlpBlock(dropout=0.0))
    plain = copy.deepcopy(model)
    with apply_partial_checkpoint(model, offload=disk(keep_last=0)):
        found: dict[int, list[Tensor]] = {}

        def work(index: int) -> None:
            for _ in range(20):
                loss = model(inputs(index)).pow(2).sum()
                found[index] = list(torch.autograd.grad(loss, list(model.parameters())))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    for index, gradients in found.items():
        loss = plain(inputs(index)).pow(2).sum()
        assert_same(gradients, list(torch.autograd.grad(loss, list(plain.parameters()))))
    assert len(found) == 3


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.norm = nn.LayerNorm(DIM)

    def forward(self, x: Tensor, *, mask: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, dim=-1)  # views of one storage
        return torch.relu_(x + scaled_dot_product_attention(q, k, v, attn_mask=mask))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(4))
        self.register_buffer("bias", torch.zeros(ROWS, ROWS))

    def forward(self, x: Tensor) -> Tensor:
        mask = (self.bias + 1)[:1].expand(ROWS, ROWS)
        for block in self.blocks:
            x = block(x, mask=mask)
        return x


@pytest.mark.parametrize("scope", ["inputs", "kept", "all"])
def test_views_expanded_masks_and_in_place_activations(scope: Any) -> None:
    same_as_plain(Model(), offload=disk(scope=scope, keep_last=0), every_n=2)


def test_complex_numbers_and_strides() -> None:
    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            spectrum = torch.fft.fft(self.linear(x.t().contiguous().t()))
            return (spectrum * spectrum.conj()).real

    report = same_as_plain(Stack(Spectral), offload=disk(scope="kept", keep_last=0), every_n=9)
    assert report.stayed_bytes.keys() <= {"a parameter", "no plain tensor", "below min_bytes"}


# --- what moves


@dataclass
class Extra:
    scale: Tensor


class Wordy(nn.Module):
    """Tensors in keywords, and in a dataclass in a list in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, *, extra: dict[str, Any], mask: Tensor) -> Tensor:
        return self.linear(x * extra["deep"][0].scale) * mask


class WordyModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wordy() for _ in range(3))
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ones(DIM)[None].expand(ROWS, DIM)
        for block in self.blocks:
            x = block(x, extra={"deep": [Extra(self.scale * 2)]}, mask=mask)
        return x


def test_tensors_in_keywords_and_containers_move_and_a_shared_one_moves_once() -> None:
    report = same_as_plain(WordyModel(), offload=disk(keep_last=0), steps=1)
    # Each of three blocks: x and the scale. Once for all: the mask, an expanded row.
    assert report.out_bytes == 4 * (3 * (ROWS * DIM + DIM) + DIM)
    assert report.asked_bytes == report.out_bytes


def held_after_forward(model: nn.Module, x: Tensor, offload: Any) -> tuple[int, int]:
    """Bytes held between forward and backward, and those that waited elsewhere."""
    with (
        apply_partial_checkpoint(model, offload=offload) as handle,
        track_peak(model, x) as tracker,
    ):
        before = tracker.current_bytes
        loss = model(x).sum()
        if handle.offloader is not None:
            handle.offloader.settle()
        held = tracker.current_bytes - before
        loss.backward()
        away = 0 if handle.offloader is None else handle.offloader.report().out_bytes
    return held, away


@pytest.mark.parametrize("keep_last", [0, 1, 2, 9])
def test_bytes_held_fall_by_the_inputs_of_all_but_the_last(keep_last: int) -> None:
    x = torch.randn(32, DIM)
    here, _ = held_after_forward(Stack(num_blocks=6), x, False)
    held, away = held_after_forward(Stack(num_blocks=6), x, disk(keep_last=keep_last))
    assert here - held == away == max(6 - keep_last, 0) * x.nbytes


def test_what_kept_blocks_save_leaves_as_well() -> None:
    x = torch.randn(32, DIM)
    model = Stack(num_blocks=4)
    model.requires_grad_(True)

    def held(offload: Any) -> tuple[int, int]:
        with apply_partial_checkpoint(model, every_n=9, offload=offload) as handle:
            with track_peak(model, x) as tracker:
                before = tracker.current_bytes
                loss = model(x).sum()
                if handle.offloader is not None:
                    handle.offloader.settle()
                held = tracker.current_bytes - before
                loss.backward()
            return held, 0 if handle.offloader is None else handle.offloader.report().out_bytes

    here, _ = held(False)
    rest, away = held(disk(scope="kept", keep_last=0))
    # Each of three kept blocks: its input and its result of tanh and of dropout, both twice as
    # wide, and dropout's mask of bytes. The result of block 3 is also the input of the head.
    assert here - rest == away
    assert away >= 3 * (x.nbytes + 2 * 2 * x.nbytes)


def test_the_peak_is_that_of_the_first_blocks_backward() -> None:
    """Predicted by a replay without offload: there nothing is held but the first block's input."""
    torch.manual_seed(0)
    model = Stack(lambda: MlpBlock(dropout=0.0), num_blocks=12)
    x = torch.randn(512, DIM)

    def peak(offload: Any, from_first_block: bool) -> int:
        model.zero_grad(set_to_none=True)
        with (
            apply_partial_checkpoint(model, offload=offload) as handle,
            track_peak(model, x) as tracker,
        ):

            def reset(grad: Tensor) -> None:
                if from_first_block:
                    tracker.reset_peak()

            hook = model.layers[0].register_forward_hook(
                lambda module, args, result: result.register_hook(reset) and None
            )
            loss = model(x).sum()
            if handle.offloader is not None:
                handle.offloader.settle()  # on a busy machine a copy may take longer than a block
            loss.backward()
            hook.remove()
        return tracker.peak_bytes

    plain, replayed = peak(False, False), peak(False, True)
    gradients = sum(p.nbytes for p in model.layers[0].parameters())
    for prefetch in (0, 1, 2):
        offloaded = peak(disk(min_bytes=1024, keep_last=1, prefetch=prefetch), False)
        # Each block that is fetched ahead costs one input, while another block's backward runs,
        # which then has the gradients of that many blocks less.
        assert offloaded == replayed + prefetch * (x.nbytes - gradients)
        assert plain - offloaded > 6 * x.nbytes


@pytest.mark.parametrize("scope", ["inputs", "all"])
@pytest.mark.parametrize("early", [True, False])
def test_a_recompute_that_torch_ends_early(early: bool, scope: Any) -> None:
    """By an exception, once all that backward needs is there: here in a block's last layer."""
    model = Stack(lambda: MlpBlock(dropout=0.0))
    plain = copy.deepcopy(model)
    square(plain)
    calls: Counter[str] = Counter()
    storages: list[weakref.ref[Any]] = []
    for layer in model.layers:
        layer.down.register_forward_pre_hook(lambda *_: calls.update(["begun"]))
        layer.down.register_forward_hook(lambda *_: calls.update(["ended"]))
        layer.up.register_forward_pre_hook(
            lambda module, args: storages.append(weakref.ref(args[0].untyped_storage()))
        )
    with (
        apply_partial_checkpoint(model, 2, disk(scope=scope, keep_last=0)) as handle,
        set_checkpoint_early_stop(early),
    ):
        model.register_forward_hook(lambda *_: offloader_of(handle).settle())
        for _ in range(3):
            model.zero_grad()
            square(model)
            assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])
        assert offloader_of(handle).report().in_bytes > 0
    assert calls == {"begun": 3 * (4 + 2), "ended": 3 * (4 + (0 if early else 2))}
    assert [storage() for storage in storages] == [None] * 18, "the end of one still holds it"


def test_nothing_keeps_what_has_left() -> None:
    model = Stack()
    storages: list[weakref.ref[Any]] = []
    for layer in model.layers:
        layer.register_forward_pre_hook(
            lambda module, args: storages.append(weakref.ref(args[0].untyped_storage()))
        )
    with apply_partial_checkpoint(model, offload=disk(keep_last=0)) as handle:
        loss = model(inputs()).sum()
        offloader_of(handle).settle()
        assert [storage() for storage in storages] == [None] * 4
        loss.backward()


def test_parameters_their_views_and_buffers_stay() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)
            self.register_buffer("scale", torch.ones(DIM))

        def forward(self, x: Tensor, weight: Tensor, row: Tensor, plain: Tensor, b: Tensor) -> Any:
            return self.linear(x) @ weight * row * plain * b * self.scale

    class TiedModel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Tied() for _ in range(2))
            self.weight = nn.Parameter(torch.eye(DIM))
            self.register_buffer("b", torch.ones(2 * DIM))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                w = self.weight
                x = block(x, w.t(), w[0], w.detach()[1] + 1, self.b[:DIM])
            return x

    for scope in ("inputs", "kept"):
        model = TiedModel()
        every_n = 1 if scope == "inputs" else 2
        config = disk(scope=scope, keep_last=0)
        with apply_partial_checkpoint(model, every_n, config) as handle:
            model(inputs()).sum().backward()
            report = offloader_of(handle).report()
        assert report.stayed_bytes["a parameter"] >= 4 * DIM * DIM
        assert report.stayed_bytes["a buffer"] >= 4 * 2 * DIM
        if scope == "inputs":  # x and the sum, of each block
            assert report.out_bytes == 2 * 4 * (ROWS * DIM + DIM)
            assert report.stayed_bytes["a parameter"] == 4 * DIM * DIM
            assert report.stayed_bytes["a buffer"] == 4 * 2 * DIM


class TakesWeight(MlpBlock):
    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().forward(x) @ weight


def test_a_parameter_of_nobody_in_the_model_and_its_view_stay() -> None:
    """One that is handed in from outside of the module that the plan is for."""
    block, weight = nn.ModuleList([TakesWeight()]), nn.Parameter(torch.eye(DIM))
    with apply_partial_checkpoint(block, layers="0", offload=disk(keep_last=0)) as handle:
        block[0](inputs(), weight.t()).sum().backward()
        assert offloader_of(handle).report().stayed_bytes == {"a parameter": 4 * DIM * DIM}


class Odd(Tensor):
    pass


class Taking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor, other: Any) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.ones(DIM).as_subclass(Odd), "no plain tensor"),
        (lambda: torch.eye(DIM).to_sparse(), "no plain tensor"),
        (lambda: torch.ones(DIM, dtype=torch.complex64).conj(), "no plain tensor"),
        (lambda: torch.ones(DIM, device="meta"), "no plain tensor"),
        (lambda: torch.ones(1), "below min_bytes"),
        (lambda: torch.ones(0), "below min_bytes"),
    ],
)
def test_what_cannot_move_stays_and_is_counted(make: Callable[[], Tensor], reason: str) -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Taking() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, make())
            return x

    model = Chain()
    with apply_partial_checkpoint(model, offload=disk(min_bytes=16, keep_last=0)) as handle:
        model(inputs()).sum().backward()
        report = offloader_of(handle).report()
    assert report.out_bytes == 2 * ROWS * DIM * 4
    assert reason in report.stayed_bytes


# --- changes in place


def test_an_input_that_is_changed_after_forward_is_an_error() -> None:
    """While its copy may be under way, that is. Later the copy holds what the block saw."""
    for keep_last in (0, 9):
        model = Stack()
        with apply_partial_checkpoint(model, offload=disk(keep_last=keep_last)) as handle:
            x = model.stem(inputs())
            loss = model.layers[0](x).sum()
            if keep_last == 0:
                offloader_of(handle).settle()
            with torch.no_grad():
                x.add_(1)
            if keep_last:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()
        if keep_last == 0:
            ours = model.layers[0].up.weight.grad
            model.zero_grad()
            torch.manual_seed(0)
            assert ours is not None


@pytest.mark.parametrize("keep_last", [0, 9])
def test_a_block_that_changes_its_input_is_an_error(keep_last: int) -> None:
    """As in plain training, whatever the copies did meanwhile."""

    class Rude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            return self.linear(x)

    model = Stack(Rude)
    with apply_partial_checkpoint(model, offload=disk(keep_last=keep_last)):
        loss = model(inputs()).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_block_that_changes_a_shared_input_is_an_error() -> None:
    """Its copy has left long ago, with the right values; but the block would change what comes back
    for the other block as well."""

    class Rude(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(DIM, DIM)

        def forward(self, x: Tensor, shared: Tensor, change: bool) -> Tensor:
            result = self.linear(x) * shared.clone()
            if change:
                shared.add_(1)
            return result

    blocks = nn.ModuleList(Rude() for _ in range(2))
    with apply_partial_checkpoint(blocks, offload=disk(keep_last=0)) as handle:
        shared = torch.ones(DIM)
        x = blocks[0](inputs(), shared, change=False)
        offloader_of(handle).settle()
        loss = blocks[1](x, shared, change=True).sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_a_parameter_that_is_changed_under_a_kept_block_is_an_error() -> None:
    model = Stack(lambda: MlpBlock(dropout=0.0))
    with apply_partial_checkpoint(model, every_n=9, offload=disk(scope="kept")):
        loss = model(inputs()).sum()
        with torch.no_grad():
            model.layers[1].down.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


# --- life and death


def test_removal_leaves_graphs_that_are_alive() -> None:
    model = Stack(lambda: MlpBlock(dropout=0.0))
    square(model)
    plain = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    handle = apply_partial_checkpoint(model, 2, offload=disk(scope="all", keep_last=0))
    loss = model(inputs()).pow(2).mean()
    handle.remove()
    del handle
    gc.collect()
    loss.backward()
    assert_same([p.grad for p in model.parameters()], plain)


def test_a_new_plan_on_the_same_blocks_uses_its_own_place() -> None:
    model = Stack()
    first = apply_partial_checkpoint(model, offload=disk(keep_last=0))
    second = apply_partial_checkpoint(model, offload=disk(keep_last=0))
    square(model)
    assert offloader_of(first).report().out_bytes == 0
    assert offloader_of(second).report().out_bytes > 0
    second.remove()
    square(model)
    assert offloader_of(first).report().out_bytes > 0
    first.remove()
    square(model)


def test_kept_blocks_are_as_they_were_after_removal() -> None:
    model = Stack()
    kind = type(model.layers[1])
    with apply_partial_checkpoint(model, 2, offload=disk(scope="kept")) as handle:
        assert [(b.action, b.offload) for b in handle.plan] == [
            ("recompute", None),
            ("keep", "disk"),
        ] * 2
        assert type(model.layers[1]) is not kind
        assert isinstance(model.layers[1], kind)
    assert type(model.layers[1]) is kind


def test_copies_and_pickles_know_nothing_of_it() -> None:
    model = Stack()
    with apply_partial_checkpoint(model, 2, offload=disk(scope="all")) as handle:
        copies = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
        for other in copies:
            square(other)
            assert [type(layer) for layer in other.layers] == [MlpBlock] * 4
        assert offloader_of(handle).report().out_bytes == 0


def test_a_dropped_model_takes_its_place_along() -> None:
    model = Stack()
    handle = apply_partial_checkpoint(model, offload=disk())
    square(model)
    gone = weakref.ref(offloader_of(handle)), weakref.ref(model)
    del model, handle
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def run_steps(model: nn.Module, number: int) -> None:
    for index in range(number):
        loss = model(inputs(index)).sum()
        if index % 5 == 1:
            continue  # a forward without backward
        if index % 5 == 2:
            loss.backward(retain_graph=True)
        if index % 5 == 3:
            with torch.no_grad():
                model(inputs(index))
            loss.backward(inputs=[model.layers[2].up.weight])
            continue
        if index % 5 == 4:
            hook = model.layers[1].down.register_forward_hook(_raise)
            with pytest.raises(ValueError, match="in between"):
                model(inputs(index))
            hook.remove()
        loss.backward()


def _raise(*args: Any) -> None:
    raise ValueError("in between")


@pytest.fixture
def no_cycles() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_nothing_grows_over_a_thousand_steps(no_cycles: None) -> None:
    """Steps, forwards without backward, exceptions and partial backwards. The garbage collector
    is off: it would hide what holds itself."""
    model = Stack(lambda: MlpBlock(dropout=0.0))
    with apply_partial_checkpoint(model, 2, offload=disk(scope="all")) as handle:
        run_steps(model, 50)
        offloader = offloader_of(handle)
        offloader.settle()
        before, taken = _objects(), offloader.report().taken_bytes
        num_threads = threading.active_count()
        run_steps(model, 1000)
        offloader.settle()
        after, taken_after = _objects(), offloader.report().taken_bytes
    assert threading.active_count() == num_threads
    # The thread may be in the middle of a copy whose graph was dropped, and was not at first.
    assert taken_after <= taken + 4096
    grown = {k: n - before.get(k, 0) for k, n in after.items()}
    # Each kind of step came 200 times. A few objects more are what the thread is at, and what died
    # since somebody looked.
    assert {k: n for k, n in grown.items() if n > 50} == {}


def _objects() -> dict[str, int]:
    counts: dict[str, int] = {}
    for value in gc.get_objects():
        kind = type(value)
        if str(kind.__module__).startswith(("lightning_ckpt", "weakref", "torch")):
            counts[kind.__qualname__] = counts.get(kind.__qualname__, 0) + 1
    return counts


def test_an_error_in_backward_leaves_nothing() -> None:
    model = Stack(lambda: MlpBlock(dropout=0.0))
    plain = copy.deepcopy(model)
    with apply_partial_checkpoint(model, offload=disk(prefetch=2)) as handle:
        fail: list[bool] = []
        x = model.stem(inputs())
        for layer in model.layers:
            x = layer(x)
            x.register_hook(lambda grad: _raise() if fail else None)
        fail.append(True)
        with pytest.raises(ValueError, match="in between"):
            x.sum().backward()
        fail.clear()
        del x
        model.zero_grad()
        square(model)
        offloader = offloader_of(handle)
        assert offloader.report().asked_bytes <= 4 * ROWS * DIM * 4
    square(plain)
    assert_same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


# --- compiled code


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on import
@pytest.mark.parametrize("scope", ["inputs", "kept"])
@pytest.mark.parametrize("part", ["model", "blocks", "inside"])
def test_compiled_code_around_and_inside(part: str, scope: Any) -> None:
    torch._dynamo.reset()
    model = Stack(lambda: MlpBlock(dropout=0.0))
    plain = train(copy.deepcopy(model), square)
    with (
        apply_partial_checkpoint(model, 2, offload=disk(scope=scope)) as handle,
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        called: Any = model
        if part == "model":
            called = torch.compile(model, backend="aot_eager")
        for layer in model.layers:
            if part == "blocks":
                layer.compile(backend="aot_eager")
            if part == "inside":
                layer.up.compile(backend="aot_eager")
        ours = train(model, lambda _: called(inputs()).pow(2).mean().backward())
        report = offloader_of(handle).report()
    assert_same(ours, plain)
    assert report.out_bytes > 0
    said = [str(w.message) for w in caught if "offloaded" in str(w.message)]
    assert bool(said) == (part != "inside")


# --- without a device


def test_on_a_cpu_the_host_has_nothing_to_move_and_that_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    if torch.accelerator.is_available():
        pytest.skip("there is an accelerator here")
    model = Stack()
    plain = train(copy.deepcopy(model), square)
    with apply_partial_checkpoint(model, offload=True) as handle:
        assert handle.offloader is None
        assert_same(train(model, square), plain)
    assert caplog.text.count("nothing to move") == 1
