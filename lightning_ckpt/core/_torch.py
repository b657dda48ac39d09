"""Every private torch name that we touch, and why.

Public torch has no way to do these things. Each name has a test that fails when it moves.
"""

import gc
import os
from collections.abc import Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch._C import _autograd as profiler_calls
from torch._C import _profiler as profiler_types
from torch._dynamo.eval_frame import OptimizedModule
from torch._functorch import config as _compiler_config
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.fake_tensor import unset_fake_temporarily as without_fake_mode
from torch.autograd.profiler import KinetoStepTracker
from torch.distributed._composable.contract import _get_registry
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FullyShardedDataParallel

# The base class of every dispatch mode; there is no public spelling of it.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "ATTENTION",
    "BATCH_STATISTICS",
    "CASTS",
    "GROUPED_PRODUCTS",
    "PRODUCTS",
    "ROUTING",
    "Allocation",
    "FakeTensorMode",
    "FullyShardedDataParallel",
    "OptimizedModule",
    "TorchDispatchMode",
    "alias",
    "changes_arguments",
    "checkpoint_around",
    "checkpointed_by_torch",
    "compiler_memory_budget",
    "coo_parts",
    "depends_on_values",
    "fsdp_names",
    "has_known_values",
    "is_compiled",
    "is_fake",
    "profiler_in_use",
    "record_memory_history",
    "save_memory_snapshot",
    "start_allocation_events",
    "stop_allocation_events",
    "stop_memory_history",
    "storage_uses",
    "tensor_version",
    "view_base",
    "without_fake_mode",
]

# BatchNorm and InstanceNorm of every dimension share this base and no public one.
BATCH_STATISTICS = nn.modules.batchnorm._NormBase


def _operations(*names: str) -> frozenset[Any]:
    """All overloads of these operations, of those that this torch has."""
    packets = [getattr(torch.ops.aten, name, None) for name in names]
    return frozenset(
        getattr(packet, overload) for packet in packets if packet for overload in packet.overloads()
    )


# What a dispatch mode sees where a model calls `scaled_dot_product_attention`, multiplies matrices,
# or chooses experts.
ATTENTION = _operations(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
PRODUCTS = _operations("mm", "addmm", "bmm", "baddbmm", "_scaled_mm", "_grouped_mm", "convolution")
ROUTING = _operations("topk")
_EMPTY = _operations("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
GROUPED_PRODUCTS = _operations("_grouped_mm")
CASTS = _operations("_to_copy")


def checkpointed_by_torch(module: nn.Module) -> str | None:
    """Name the torch API that makes `module` checkpoint itself, or None.

    `checkpoint_wrapper` puts a module around it; the composable `checkpoint` leaves an entry in the
    module's contract registry and nothing else that could be seen.
    """
    if isinstance(module, CheckpointWrapper):
        return "checkpoint_wrapper"
    if "checkpoint" in (_get_registry(module) or ()):
        return "the composable checkpoint API"
    return None


def checkpoint_around() -> Literal["non-reentrant", "reentrant"] | None:
    """Which form of torch's checkpoint recomputes, or will recompute, the code that asks, if any.

    The non-reentrant one shows by its hooks, in forward and in the recompute. The reentrant one
    runs without gradients in forward; its recompute is a forward in the middle of a backward pass.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None:
        return "reentrant" if torch._C._current_graph_task_id() != -1 else None
    name: str = getattr(hooks[0], "__qualname__", "")
    is_torchs = name.startswith(("_checkpoint_hook.", "_recomputation_hook."))
    return "non-reentrant" if is_torchs else None


def compiler_memory_budget() -> float:
    """The share of activations that compiled code may keep; below 1 it recomputes by itself."""
    return float(_compiler_config.activation_memory_budget)


def changes_arguments(operation: Any) -> bool:
    """Whether an operation, as a dispatch mode gets it, changes one of its arguments in place."""
    schema = getattr(operation, "_schema", None)  # higher-order operators have none
    return schema is not None and schema.is_mutable


def has_known_values(operation: Any) -> bool:
    """Whether what an operation gives follows from what it is given: an ordinary one (not one of
    higher order) that draws no random numbers and leaves nothing as it lay in memory."""
    is_ordinary = isinstance(operation, torch._ops.OpOverload) and operation not in _EMPTY
    return is_ordinary and torch.Tag.nondeterministic_seeded not in operation.tags


def depends_on_values(operation: Any) -> bool:
    """Whether an operation gives a number, or a tensor whose shape is not known beforehand."""
    tags = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
    return any(tag in operation.tags for tag in tags)


def tensor_version(tensor: Tensor) -> int:
    """How often `tensor` was changed in place, as autograd counts it (inference tensors: 0)."""
    return 0 if tensor.is_inference() else tensor._version


def storage_uses(tensor: Tensor) -> int:
    """How many tensors lie on the storage of `tensor`, plus a number that depends on the version of
    torch: ask for one that is alone as well. A Python object of the storage that is held counts."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def alias(value: Any) -> Any:
    """The same tensor without its graph, for a dispatch mode: it knows of changes in place to the
    other, too, which one that is detached there in the plain way does not."""
    if not isinstance(value, Tensor):
        return value
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return value.detach()


def view_base(tensor: Tensor) -> Tensor:
    """The tensor that `tensor` is a view of, or itself."""
    return tensor if tensor._base is None else tensor._base


def is_fake(tensor: Tensor) -> bool:
    """Whether `tensor` has no values (meta device, or a fake tensor of the compiler's)."""
    if type(tensor) is nn.Parameter:  # soon told; a fake one is of another class
        return tensor.is_meta
    return tensor.is_meta or torch._subclasses.fake_tensor.is_fake(tensor)


def coo_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Indices and values of a COO tensor (the public way demands that it is coalesced)."""
    return tensor._indices(), tensor._values()


def fsdp_names(modules: Iterable[nn.Module]) -> Iterator[tuple[nn.Module, str]]:
    """Where the FSDP (version 1) units among `modules` put parts of their flat parameter: the
    module, and the name under which it is an attribute or a parameter by turns."""
    for unit in modules:
        if isinstance(unit, FullyShardedDataParallel) and unit._handle is not None:
            flat: Any = unit._handle.flat_param
            for info in (*flat._param_infos, *flat._shared_param_infos):
                yield info.module, info.param_name
            yield unit.module, "_flat_param"


def is_compiled(value: Any) -> bool:
    """Whether `value` is a function or bound method that `torch.compile` made."""
    return (
        callable(value)
        and hasattr(value, "_torchdynamo_orig_callable")
        and not getattr(value, "_torchdynamo_disable", False)
    )


class Allocation(NamedTuple):
    """One event of torch's CPU allocator: at `time` (`time.time_ns`) `num_bytes` came to `address`,
    or went from there where the number is negative."""

    time: int
    address: int
    num_bytes: int


def profiler_in_use() -> bool:
    """Whether a profiler of torch's runs, or is about to.

    A `torch.profiler.profile` with a schedule prepares itself some steps before it runs. To start
    and stop another one meanwhile ends the process (a segmentation fault in torch 2.13), and no
    call tells of it. But a `profile` object makes an entry in the step tracker, and where there is
    one (it stays after `stop`, and goes at the end of a `with`) we look for a live object.
    """
    if profiler_calls._profiler_enabled():
        return True
    if torch.profiler.profiler.PROFILER_STEP_NAME not in KinetoStepTracker._step_dict:
        return False
    return any(issubclass(type(found), torch.profiler.profile) for found in gc.get_objects())


def start_allocation_events() -> None:
    """Let torch's profiler record allocations and nothing else (`torch.profiler` records each
    operator too). Look at `profiler_in_use` before."""
    config = profiler_types.ProfilerConfig(
        profiler_types.ProfilerState.KINETO,
        False,  # record_shapes
        True,  # profile_memory
        False,  # with_stack
        False,  # with_flops
        False,  # with_modules
        profiler_types._ExperimentalConfig(),
    )
    activities = {profiler_types.ProfilerActivity.CPU}
    # Torch 2.13 prints a line at each start and stop, unless it is told before the first.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    profiler_calls._prepare_profiler(config, activities)
    # Operators have another scope; of this one there are a few events in a step.
    scopes = {profiler_types.RecordScope.USER_SCOPE}
    profiler_calls._enable_profiler(config, activities, scopes)  # type: ignore[call-arg]


def stop_allocation_events() -> list[Allocation] | None:
    """What was recorded since the start, in order; None if somebody else's profiler ran meanwhile
    (it works, ours is gone)."""
    if not profiler_calls._profiler_enabled():
        return None
    result = profiler_calls._disable_profiler()
    events = _all_events(result.experimental_event_tree())
    return sorted(
        Allocation(event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size)
        for event in events
        if event.tag == profiler_types._EventType.Allocation
        and event.extra_fields.device.type == "cpu"
    )


def _all_events(events: Iterable[Any]) -> Iterator[Any]:
    for event in events:
        yield event
        yield from _all_events(event.children)


def record_memory_history(max_entries: int) -> None:
    """Let CUDA's allocator keep its newest events; torch documents these three with a leading
    underscore (https://docs.pytorch.org/docs/stable/torch_cuda_memory.html)."""
    torch.cuda.memory._record_memory_history(max_entries=max_entries)


def save_memory_snapshot(path: str) -> None:
    """Write what `record_memory_history` kept, for the viewer."""
    torch.cuda.memory._dump_snapshot(path)


def stop_memory_history() -> None:
    """End `record_memory_history`."""
    torch.cuda.memory._record_memory_history(enabled=None)
