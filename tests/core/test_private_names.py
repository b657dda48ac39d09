"""Each private torch name still means what `_torch.py` takes it for."""

import copyreg
import gc
import inspect
import time
import types

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.weak import WeakIdKeyDictionary

from lightning_ckpt.core import _torch


def test_modules_that_torch_checkpoints_are_known() -> None:
    assert _torch.checkpointed_by_torch(nn.Linear(2, 2)) is None
    assert _torch.checkpointed_by_torch(checkpoint_wrapper(nn.Linear(2, 2))) == "checkpoint_wrapper"
    assert "composable" in str(_torch.checkpointed_by_torch(checkpoint(nn.Linear(2, 2))))


@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # torch's own, on import
def test_a_compiled_module_is_an_optimized_module() -> None:
    compiled = torch.compile(nn.Linear(2, 2))
    assert isinstance(compiled, _torch.OptimizedModule)
    assert isinstance(compiled._orig_mod, nn.Linear)


@pytest.mark.parametrize("reentrant", [True, False])
def test_code_knows_that_torch_recomputes_it(reentrant: bool) -> None:
    seen = []

    def region(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.checkpoint_around())
        return x.sin().cos()

    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(region, x, use_reentrant=reentrant).sum().backward()
    assert seen == ([None, "reentrant"] if reentrant else ["non-reentrant"] * 2)
    with torch.autograd.graph.save_on_cpu():
        assert _torch.checkpoint_around() is None


def test_the_compilers_memory_budget_can_be_read() -> None:
    assert _torch.compiler_memory_budget() == 1
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert _torch.compiler_memory_budget() == 0.5


def test_versions_move_with_in_place_changes() -> None:
    tensor = torch.ones(2)
    before = _torch.tensor_version(tensor)
    tensor.add_(1)
    assert _torch.tensor_version(tensor) == before + 1
    with torch.inference_mode():
        assert _torch.tensor_version(torch.ones(2)) == 0


def test_a_view_knows_its_base() -> None:
    weight = nn.Parameter(torch.ones(2, 3))
    assert _torch.view_base(weight.t()) is weight
    assert _torch.view_base(weight) is weight


def test_tensors_without_values_are_known() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    assert _torch.is_fake(torch.empty(2, device="meta"))
    with FakeTensorMode():
        fake = torch.empty(2)
    assert _torch.is_fake(fake)
    assert not _torch.is_fake(torch.empty(2))


@pytest.mark.parametrize("norm", [nn.BatchNorm2d, nn.InstanceNorm1d, nn.SyncBatchNorm])
def test_norms_with_statistics_share_a_base(norm: type[nn.Module]) -> None:
    assert issubclass(norm, _torch.BATCH_STATISTICS)


def test_a_dispatch_mode_sees_operations() -> None:
    seen = []

    class Mode(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, kinds, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with Mode():
        torch.ones(2) + 1
    assert torch.ops.aten.add.Tensor in seen


def test_weak_keys_compare_tensors_by_identity() -> None:
    known = WeakIdKeyDictionary()
    first, second = torch.ones(2), torch.ones(2)
    known[first] = True
    assert first in known
    assert second not in known
    del first
    assert len(known) == 0


def test_what_pickle_and_copy_ask_a_module_for() -> None:
    """`swap.py` answers `__reduce_ex__` in the shape that `copyreg` gives it."""
    make, arguments, *_ = nn.Linear(2, 2).__reduce_ex__(4)
    assert make is copyreg.__newobj__
    assert arguments == (nn.Linear,)
    assert isinstance(copyreg._reconstructor, types.FunctionType)


def test_what_torch_compile_makes_is_known() -> None:
    function = torch.compile(torch.sin, backend="eager")
    assert _torch.is_compiled(function)
    assert not _torch.is_compiled(torch.sin)
    assert not _torch.is_compiled(torch.compiler.disable(torch.sin))


def test_parts_of_a_coo_tensor() -> None:
    indices, values = _torch.coo_parts(torch.eye(3).to_sparse())
    assert indices.shape == (2, 3)
    assert values.tolist() == [1, 1, 1]


def test_the_dear_operations_are_what_a_mode_sees() -> None:
    seen = []

    class Mode(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            seen.append(func)
            return func(*args, **(kwargs or {}))

    x = torch.ones(1, 2, 4, 8)
    with Mode():
        nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)
        nn.Linear(8, 8)(x[0])
        nn.Conv2d(2, 2, 1)(x)
        x.topk(1)
    assert sum(operation in _torch.ATTENTION for operation in seen) == 1
    assert sum(operation in _torch.PRODUCTS for operation in seen) == 2
    assert sum(operation in _torch.ROUTING for operation in seen) == 1
    assert all("aten" in str(operation) for operation in _torch.ATTENTION)
    assert len(_torch.ATTENTION) >= 4, "those of accelerators are known too"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_names_that_fsdp_manages(use_orig_params: bool, gloo: None) -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    unit = _torch.FullyShardedDataParallel(
        model, device_id=torch.device("cpu"), use_orig_params=use_orig_params
    )
    names = set(_torch.fsdp_names(unit.modules()))
    parts = {(module, name) for module in model for name in ("weight", "bias")}
    assert names == parts | {(model, "_flat_param")}
    assert ("_flat_param" in model._parameters) is not use_orig_params
    assert set(_torch.fsdp_names(nn.Linear(2, 2).modules())) == set()


def test_allocation_events_are_of_this_process_and_in_order() -> None:
    assert not _torch.profiler_in_use()
    _torch.start_allocation_events()
    assert _torch.profiler_in_use()
    kept = torch.ones(1000)
    address = kept.data_ptr()
    del kept
    events = _torch.stop_allocation_events()
    assert events is not None
    assert [e.num_bytes for e in events if e.address == address][:2] == [4000, -4000]
    assert events == sorted(events)
    assert abs(events[0].time - time.time_ns()) < 60e9  # the same clock
    assert _torch.stop_allocation_events() is None


def test_profilers_that_are_not_running_yet_are_known() -> None:
    waiting = torch.profiler.profile(schedule=torch.profiler.schedule(wait=1, warmup=1, active=1))
    waiting.start()
    assert not torch.autograd._profiler_enabled()
    assert _torch.profiler_in_use()
    waiting.stop()
    del waiting
    gc.collect()
    assert not _torch.profiler_in_use()


def test_memory_history_has_its_names() -> None:
    assert callable(torch.cuda.memory._dump_snapshot)
    parameters = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "max_entries"} <= set(parameters)


def test_values_go_without_a_fake_mode() -> None:
    with _torch.FakeTensorMode():
        assert _torch.is_fake(torch.ones(2))
        with _torch.without_fake_mode():
            assert not _torch.is_fake(torch.ones(2))
        assert _torch.is_fake(torch.ones(2))


def test_operations_that_give_what_they_are_given() -> None:
    aten = torch.ops.aten
    assert _torch.has_known_values(aten.arange.default)
    for unknown in (aten.randint.default, aten.empty_strided.default, torch.ops.higher_order.cond):
        assert not _torch.has_known_values(unknown)
    assert _torch.depends_on_values(aten.nonzero.default)
    assert _torch.depends_on_values(aten._local_scalar_dense.default)
    assert not _torch.depends_on_values(aten.add.Tensor)


def test_tensors_on_a_storage_are_counted() -> None:
    tensor = torch.ones(4)
    alone = _torch.storage_uses(torch.ones(4))
    assert _torch.storage_uses(tensor) == alone
    view = tensor[1:]
    assert _torch.storage_uses(tensor) == _torch.storage_uses(view) == alone + 1
    del view
    assert _torch.storage_uses(tensor) == alone
    saved = (tensor.requires_grad_() * 2).exp()  # a node that saves its result adds one
    assert _torch.storage_uses(saved) == alone + 1
    other = saved.detach()
    del saved
    assert _torch.storage_uses(other) == alone


def test_casts_are_known() -> None:
    assert torch.ops.aten._to_copy.default in _torch.CASTS


def test_an_alias_knows_of_changes_to_the_other() -> None:
    aliases = []

    class Mode(_torch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def, override]
            result = func(*args, **(kwargs or {}))
            aliases.extend([_torch.alias(result), result.detach()])
            return result

    with Mode():
        y = torch.ones(2, requires_grad=True) * 2
    y.add_(1)
    assert [_torch.tensor_version(alias) for alias in aliases[-2:]] == [1, 0], "the plain way: not"
    assert not aliases[-2].requires_grad
    assert _torch.alias(None) is None
