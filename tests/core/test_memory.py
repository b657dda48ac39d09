"""Live bytes on CPU against figures made by hand and against torch's profiler; allocator peaks."""

from __future__ import annotations

import dataclasses
import gc
import os
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pretended import Counters
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode

from lightning_ckpt.core.memory import peak_tracker, track_peak
from lightning_ckpt.core.memory.allocator import AllocatorPeak
from lightning_ckpt.core.memory.live_bytes import LiveBytes
from lightning_ckpt.core.memory.peak import PeakUnavailable

KIB = 1024  # bytes of 256 float32


def kib(count: float = 1) -> Tensor:
    return torch.ones(int(256 * count))


def num_modes() -> int:
    return torch._C._len_torch_dispatch_stack()


@pytest.fixture(autouse=True)
def _nothing_left_on() -> Iterator[None]:
    yield
    assert num_modes() == 0
    assert not is_in_torch_dispatch_mode()


def peak_and_rest(action: Callable[[], Any], *holders: Any) -> tuple[int, int]:
    """Peak, and what is live at the end while the result of `action` is still held, in KiB."""
    with track_peak(*holders) as tracker:
        result = action()
        rest = tracker.current_bytes
    del result
    return tracker.peak_bytes // KIB, rest // KIB


# --- what is counted


def test_each_storage_once_and_until_it_dies() -> None:
    with track_peak() as tracker:
        a = kib(4)
        view = a.view(2, -1)[1:].t()
        a.add_(1)
        assert tracker.current_bytes == 4 * KIB
        b = a * 2
        assert tracker.current_bytes == 8 * KIB
        del a
        assert tracker.current_bytes == 8 * KIB  # the view holds it
        del view
        assert tracker.current_bytes == 4 * KIB
        del b
        assert tracker.current_bytes == 0
    assert tracker.peak_bytes == 8 * KIB


def test_expanded_tensor_is_its_storage() -> None:
    assert peak_and_rest(lambda: kib().expand(100, 256)) == (1, 1)


def test_linear_chain_by_hand() -> None:
    """Width 256, batch 256: an activation and a weight are 256 KiB each."""
    chain = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(4)])
    x = torch.randn(256, 256)
    with track_peak(chain, x) as tracker:
        loss = chain(x).sum()
        held = tracker.current_bytes
        loss.backward()
    # 4 weights, the input, and the 3 inner activations that are saved; the last output is not.
    assert held == (4 + 1 + 3) * 256 * KIB + 4  # 4 bytes: the loss
    # Backward of the last layer: its input gradient beside its weight's; `sum` has the gradient
    # as an expanded scalar.
    assert tracker.current_bytes == (4 + 1 + 4) * 256 * KIB + 4
    assert tracker.peak_bytes >= (4 + 1 + 3 + 2) * 256 * KIB


def test_checkpoint_by_hand() -> None:
    """Of a block of 4 activations only the input stays; the recompute makes them again."""

    def block(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x.sin()  # saves its input
        return x

    def held_and_peak(forward: Callable[[Tensor], Tensor]) -> tuple[int, int]:
        x = kib(16).requires_grad_()
        with track_peak(x) as tracker:
            y = forward(x)
            held = tracker.current_bytes - x.nbytes - y.nbytes
            y.backward(torch.ones_like(y))
        return held // KIB, tracker.peak_bytes // KIB

    assert held_and_peak(block)[0] == 3 * 16
    held, peak = held_and_peak(lambda x: checkpoint(block, x, use_reentrant=False))
    assert held == 0
    assert peak > 5 * 16  # the recomputed activations and the gradient were seen


def test_no_grad_and_inference_count_too() -> None:
    for context in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu")):
        with context:
            assert peak_and_rest(lambda: kib() + kib()) == (3, 1)


def test_resize_changes_the_figure() -> None:
    def grow_and_shrink() -> Tensor:
        x = torch.empty(0)
        x.resize_(256 * 8)
        x.untyped_storage().resize_(2 * KIB)  # no operation: noticed at the next one
        return x.set_(x.untyped_storage(), 0, (512,))

    assert peak_and_rest(grow_and_shrink) == (8, 2)


def test_replaced_data_leaves_the_old_storage() -> None:
    p = nn.Parameter(kib(8))
    with track_peak(p) as tracker:
        p.data = kib(2)
        assert tracker.current_bytes == 2 * KIB


@dataclasses.dataclass
class Batch:
    x: Tensor
    label: str = "none"


def test_holders_are_searched_and_counted_once() -> None:
    model = nn.Linear(256, 4, bias=False)
    model.register_buffer("running", kib(3), persistent=False)
    model.weight.grad = kib(4).view(4, 256)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()  # two states of 4 KiB and a step count
    shared = kib(1)
    loop: list[Any] = [shared]
    loop.append(loop)
    batch = {"a": [Batch(kib(1))], "b": (shared, shared[1:]), "c": {"text"}, "d": loop}
    with track_peak(model, optimizer, batch) as tracker:
        pass
    assert tracker.peak_bytes == tracker.current_bytes == (4 + 3 + 4 + 8 + 1 + 1) * KIB + 4


def test_unnamed_tensors_are_met_as_arguments() -> None:
    outside, listed, written = kib(1), kib(2), kib(6)
    parts = [written[:256], written[256:512]]
    with track_peak() as tracker:
        outside.sum()
        torch.cat([listed, outside], out=kib(3))
        torch.split_with_sizes_copy(listed, [256, 256], out=parts)
    assert tracker.current_bytes == (1 + 2 + 6) * KIB


def test_sparse_tensors_count_their_parts() -> None:
    table = nn.Embedding(256, 256, sparse=True)
    with track_peak(table) as tracker:
        table(torch.arange(4)).sum().backward()
        del tracker  # the gradient must not hang on it
    assert table.weight.grad is not None
    assert table.weight.grad.is_sparse
    with track_peak(table.weight.grad) as tracker:
        pass
    assert tracker.peak_bytes == 4 * KIB + 4 * 8  # 4 rows of values and their indices


@pytest.mark.filterwarnings("ignore:Sparse CS. tensor support:UserWarning")
@pytest.mark.parametrize(
    ("layout", "num_indices"),
    # The compressed ones keep the other indices too: torch makes theirs as a view of COO's.
    [(torch.sparse_coo, 512), (torch.sparse_csr, 512 + 17), (torch.sparse_csc, 512 + 17)],
)
def test_every_sparse_layout(layout: torch.layout, num_indices: int) -> None:
    sparse = torch.ones(16, 16).to_sparse(layout=layout)
    with track_peak(sparse) as tracker:
        pass
    assert tracker.peak_bytes == KIB + 8 * num_indices


def test_meta_and_fake_tensors_are_nothing() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    def fake() -> Tensor:
        with FakeTensorMode():
            return kib(8).sin()

    assert peak_and_rest(lambda: torch.ones(2048, device="meta").sin()) == (0, 0)
    assert peak_and_rest(fake) == (0, 0)


@pytest.mark.usefixtures("gloo")
def test_sharded_tensor_counts_its_local_part() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (1,))
    parameter = nn.Parameter(distribute_tensor(kib(4), mesh, [Replicate()]))
    with track_peak(parameter) as tracker:
        assert tracker.current_bytes == 4 * KIB
        (parameter * 2).sum().backward()
        # The product's gradient times 2; the scalar gradient is expanded.
        assert tracker.current_bytes == 8 * KIB
        torch.optim.SGD([parameter], 0.1).step()
    assert tracker.peak_bytes >= 8 * KIB


# --- against torch's own profiler


def small_transformer() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(64, 4, 256, batch_first=True)
    return nn.TransformerEncoder(layer, 3), torch.randn(8, 64, 64)


def profiled_peak(step: Callable[[], Any]) -> int:
    """Bytes above the start, from the profiler's list of allocations."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    live = peak = 0
    assert profiler.profiler is not None
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("recompute", [False, True])
def test_peak_equals_the_profilers(recompute: bool) -> None:
    model, x = small_transformer()

    def step() -> None:
        y = x
        for layer in model.layers:
            y = checkpoint(layer, y, use_reentrant=False) if recompute else layer(y)
        y.sum().backward()
        model.zero_grad()

    step()
    expected = profiled_peak(step)
    with track_peak(model, x) as tracker:
        start = tracker.current_bytes
        step()
    assert tracker.peak_bytes - start == pytest.approx(expected, rel=0.01)


def test_llama_figures() -> None:
    """The known figures of this shape, with the switch that transformers itself has."""
    transformers = pytest.importorskip("transformers", minversion="5")
    config = transformers.LlamaConfig(
        hidden_size=256,
        intermediate_size=691,
        num_hidden_layers=12,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=512,
        max_position_embeddings=1024,
    )
    model = transformers.LlamaForCausalLM(config).train()
    tokens = torch.randint(512, (8, 256))

    def peak_mib() -> float:
        model.zero_grad()
        with track_peak(model, tokens) as tracker:
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        return tracker.peak_bytes / 2**20

    assert peak_mib() == pytest.approx(555.5, rel=0.01)
    if not hasattr(model, "activation_checkpointing_enable"):
        pytest.skip("an older transformers")
    model.activation_checkpointing_enable()
    assert peak_mib() == pytest.approx(126.3, rel=0.01)


def test_equal_steps_give_equal_figures() -> None:
    model, x = small_transformer()
    optimizer = torch.optim.AdamW(model.parameters())
    figures = []
    for _ in range(4):
        with track_peak(model, optimizer, x) as tracker:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        figures.append((tracker.peak_bytes, tracker.current_bytes))
    assert figures[1] == figures[2] == figures[3]


# --- pause, reset, stop


def test_pause_leaves_out_births_but_not_deaths() -> None:
    early = kib(2)
    tracker = LiveBytes()
    tracker.resume(early)
    tracker.pause()
    late = kib(100)
    del early
    assert num_modes() == 0
    assert tracker.current_bytes == 0
    tracker.resume()
    late.sum().item()
    assert tracker.current_bytes == 100 * KIB
    tracker.stop()


def test_reset_starts_at_the_live_bytes() -> None:
    with track_peak() as tracker:
        kept = kib(2)
        kib(10)
        assert tracker.peak_bytes == 12 * KIB
        tracker.reset_peak(kib(1))
        assert tracker.peak_bytes == 3 * KIB  # what was named counts from here on
        kib(1)
    assert tracker.peak_bytes == 3 * KIB
    assert kept.numel()


def test_twice_is_once() -> None:
    tracker = LiveBytes()
    tracker.pause()
    tracker.resume()
    tracker.resume()
    assert num_modes() == 1
    x = kib(1)
    tracker.pause()
    tracker.pause()
    tracker.stop()
    tracker.stop()
    assert tracker.peak_bytes == x.nbytes


def test_nothing_is_kept_alive() -> None:
    with track_peak() as tracker:
        storage = weakref.ref(kib(4).sin().untyped_storage())
        assert storage() is None
        kept = kib(4)
    before = tracker.current_bytes
    del kept
    assert tracker.current_bytes == before == 4 * KIB  # it has let go of what it followed
    ended = weakref.ref(tracker)
    del tracker
    gc.collect()
    assert ended() is None


def test_exception_takes_the_mode_off() -> None:
    with pytest.raises(ZeroDivisionError), track_peak():
        _ = 1 / 0
    assert num_modes() == 0


def test_two_trackers_in_any_order() -> None:
    first, second = LiveBytes(), LiveBytes()
    first.resume()
    second.resume()
    a = kib(1)
    first.pause()
    b = kib(2)
    first.resume()
    c = kib(4)
    first.pause()
    second.pause()
    assert (first.peak_bytes, second.peak_bytes) == (5 * KIB, 7 * KIB)
    assert a.numel() + b.numel() + c.numel()


def test_inside_and_around_other_modes_and_a_profiler() -> None:
    layer, x = nn.Linear(16, 16), torch.randn(4, 16)

    def step() -> None:
        layer(x).sum().backward()
        layer.zero_grad()

    alone = peak_and_rest(step, layer, x)
    with FlopCounterMode(display=False) as around:
        assert peak_and_rest(step, layer, x) == alone
    with (
        track_peak(layer, x) as tracker,
        FlopCounterMode(display=False) as inside,
        profile(activities=[ProfilerActivity.CPU]),
    ):
        step()
    assert tracker.peak_bytes // KIB == alone[0]
    assert around.get_total_flops() == inside.get_total_flops() > 0


@pytest.mark.skipif(
    torch.__version__.startswith("2.8."), reason="torch 2.8 refuses them under any dispatch mode"
)
def test_higher_order_operators_run() -> None:
    with track_peak() as tracker:
        y = torch.cond(torch.tensor(True), torch.sin, torch.cos, (kib(1),))
    assert y.nbytes == KIB
    assert tracker.peak_bytes >= 2 * KIB


class Seven(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return kib(7) + os.getpid() * 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_forked_workers_do_not_count() -> None:
    def in_child() -> int:
        x = kib(5)
        return tracker.current_bytes - x.nbytes * 0

    with track_peak() as tracker:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(write, str(in_child()).encode())
            os._exit(0)
        os.waitpid(child, 0)
        assert os.read(read, 100) == b"0"
        loader = DataLoader(Seven(), num_workers=1, multiprocessing_context="fork")
        total = sum(batch.sum().item() for batch in loader)
    assert total == 4 * 7 * 256


# --- compiled code


class CompiledForward(nn.Module):
    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return x


class CompiledAttribute(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.function = torch.compile(torch.sin, backend="eager")


class CompileDisabled(nn.Module):
    @torch._dynamo.disable
    def forward(self, x: Tensor) -> Tensor:
        return x


def compiled_in_place() -> nn.Module:
    layer = nn.Linear(2, 2)
    layer.compile(backend="eager")
    return layer


@pytest.mark.parametrize(
    "make",
    [
        compiled_in_place,
        lambda: torch.compile(nn.Linear(2, 2), backend="eager"),
        CompiledForward,
        CompiledAttribute,
    ],
)
def test_compiled_modules_are_refused(make: Callable[[], nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(2, 2), make())
    with pytest.raises(PeakUnavailable, match=r"^1 \(\w+\) is compiled.*without `torch.compile`"):
        peak_tracker("cpu", model)
    with pytest.raises(PeakUnavailable), track_peak(model):
        pass


def test_disabled_compilation_is_no_compilation() -> None:
    peak_tracker("cpu", CompileDisabled())


@pytest.mark.skipif(
    not hasattr(torch.utils._python_dispatch, "is_in_any_mode_without_ignore_compile_internals"),
    reason="this torch runs no compiled code under any dispatch mode",
)
def test_unseen_compiled_function_stays_compiled() -> None:
    graphs = []

    def backend(graph: Any, example_inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    function = torch.compile(lambda x: x.sin().cos(), backend=backend)
    with track_peak():
        function(kib(1))
    assert len(graphs) == 1


# --- accelerators


def run(tracker: AllocatorPeak, counters: Counters, *lives: int) -> None:
    tracker.resume()
    for live in lives:
        counters.set(live)
    tracker.pause()


@pytest.fixture
def counters() -> Counters:
    return Counters()


@pytest.fixture
def tracker(counters: Counters) -> AllocatorPeak:
    return AllocatorPeak(torch.device("cuda", 0), counters)


def test_device_peak_starts_at_the_current_bytes(
    counters: Counters, tracker: AllocatorPeak
) -> None:
    counters.set(900)
    counters.set(50)
    tracker.reset_peak()
    assert tracker.peak_bytes == 50
    run(tracker, counters, 300, 60)
    assert tracker.peak_bytes == 300
    tracker.reset_peak()
    assert tracker.peak_bytes == tracker.current_bytes == 60


def test_device_pause_is_left_out(counters: Counters, tracker: AllocatorPeak) -> None:
    tracker.reset_peak()
    run(tracker, counters, 300, 60)
    counters.set(1000)
    counters.set(60)
    assert tracker.peak_bytes == 300
    run(tracker, counters, 200)
    assert tracker.peak_bytes == 300
    run(tracker, counters, 400, 10)
    tracker.stop()
    assert tracker.peak_bytes == 400


def test_device_counter_is_reset_no_more_than_needed(
    counters: Counters, tracker: AllocatorPeak
) -> None:
    tracker.reset_peak()
    for _ in range(5):
        run(tracker, counters, 300, 60)
        counters.set(299)
        counters.set(60)
    assert counters.num_resets == 1
    assert counters.peak == 300  # what another reader sees


def test_resets_by_others_in_a_pause_cost_nothing(
    counters: Counters, tracker: AllocatorPeak
) -> None:
    tracker.reset_peak()
    run(tracker, counters, 300, 60)
    counters.reset_peak_memory_stats(None)
    run(tracker, counters, 100)
    assert tracker.peak_bytes == 300


def fake_device_module(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)


def test_device_module_serves_where_torch_accelerator_cannot(
    monkeypatch: pytest.MonkeyPatch, counters: Counters
) -> None:
    counters.set(70)
    fake_device_module(monkeypatch, counters)
    tracker = peak_tracker("cuda:0")
    tracker.reset_peak()
    assert tracker.peak_bytes == 70


def test_torch_accelerator_is_preferred(
    monkeypatch: pytest.MonkeyPatch, counters: Counters
) -> None:
    counters.set(70)
    accelerator = SimpleNamespace(
        current_accelerator=lambda: torch.device("cuda"),
        memory_allocated=counters.memory_allocated,
        max_memory_allocated=counters.max_memory_allocated,
        reset_peak_memory_stats=counters.reset_peak_memory_stats,
    )
    monkeypatch.setattr(torch, "accelerator", accelerator)
    fake_device_module(monkeypatch, None)
    tracker = peak_tracker("cuda:0")
    tracker.reset_peak()
    assert tracker.peak_bytes == 70


@pytest.mark.parametrize("device", ["mps", "meta", "xla"])
def test_devices_without_a_peak_have_no_figure(device: str) -> None:
    with pytest.raises(PeakUnavailable, match=device if device != "mps" else "MPS"):
        peak_tracker(device)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_peak() -> None:
    held = torch.empty(2**20, device="cuda")
    before = torch.cuda.memory_allocated()
    with track_peak(device="cuda") as tracker:
        assert tracker.peak_bytes == before
        torch.empty(2**22, device="cuda")
    assert tracker.peak_bytes == before + 2**24
    assert held.numel()
