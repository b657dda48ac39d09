"""Which results a partly recomputed block keeps: the ones that cost most to compute again.

By torch's selective checkpoint contexts. What attention and matrix products gave is kept, all that
is pointwise is computed again. The choice of a router's top-k is always kept, or near-ties could
send tokens to other experts in the recompute (pytorch/torchtitan#1117).

Note: [Narrow contexts]
Torch's contexts are dispatch modes: Python for each operation, in forward and in the recompute. In
a Llama block of width 256 on a CPU that took as long as the attention which it spared. So they
stand around those calls alone that may come to a kept result, and a function mode, which costs a
quarter and is asked once for a `linear` or a `silu`, tells which. Forward and recompute make the
same calls, so both see the same results in the same order. What no function mode sees (the inside
of TorchScript, and of what `torch.compile` made) is computed again.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import (
    BuiltinFunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
)
from typing import Any, Literal, cast

from torch.compiler import is_compiling
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)
from typing_extensions import override

from lightning_ckpt.core._torch import ATTENTION, PRODUCTS, ROUTING, TorchDispatchMode

Saving = Literal["recompute_saving", "recompute_saving_attention"]
Policy = Callable[..., CheckpointPolicy]
Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


SAVED: dict[str, frozenset[Any]] = {
    "recompute_saving": ATTENTION | PRODUCTS | ROUTING,
    "recompute_saving_attention": ATTENTION | ROUTING,
}


def saving_of(action: str) -> Saving | None:
    """What a block of this action keeps of its results; None: nothing, or all."""
    return cast(Saving, action) if action in SAVED else None


def contexts(saving: Saving) -> Contexts:
    """A context for the forward, which keeps the results, and one for the recompute, which takes
    them instead of computing them: once, then they are gone."""
    return create_selective_checkpoint_contexts(_POLICIES[saving])


def _policy(saved: frozenset[Any]) -> Policy:
    def choose(
        context: SelectiveCheckpointContext, operation: Any, *args: Any, **kwargs: Any
    ) -> CheckpointPolicy:
        if operation in saved:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return choose


_POLICIES: dict[str, Policy] = {name: _policy(saved) for name, saved in SAVED.items()}


class Narrow(TorchFunctionMode):
    """Note: [Narrow contexts].

    Args:
        context: one of torch's.
        saving: what it was made for.
    """

    def __init__(self, context: Any, saving: Saving) -> None:
        super().__init__()
        self._around = _Around(context)
        self._names = _CALLS[saving]

    @override
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_compiling():  # our modes must not be in its graph
            return func(*args, **(kwargs or {}))
        if type(func) in _IN_C:  # of most calls no more than this is asked: it takes time in each
            may_keep = func.__name__ in self._names
        else:
            may_keep = getattr(func, "__name__", "") not in _IN_PYTHON
        if not may_keep:
            return func(*args, **(kwargs or {}))
        with self._around:
            return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep nothing meanwhile: a block that runs backward inside its forward is computed again
        in the middle of it, and what that gives is not what the recompute will ask for."""
        self._around.on = False
        try:
            yield
        finally:
            self._around.on = True


def narrow_contexts(saving: Saving) -> tuple[Narrow, Narrow]:
    """Those of `contexts`, which cost less. Not for compiled code."""
    forward, recompute = contexts(saving)
    return Narrow(forward, saving), Narrow(recompute, saving)


class _Around(TorchDispatchMode):
    """Gives operations to another mode, which is never entered itself: torch's begins anew then."""

    supports_higher_order_operators = True

    def __init__(self, mode: Any) -> None:
        super().__init__()
        self._mode = mode
        self.on = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    @override
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.on:
            return func(*args, **(kwargs or {}))
        return self._mode.__torch_dispatch__(func, types, args, kwargs or {})


# Of what is written in C the calls are known that come to a kept result. What is written in Python
# may call anything (`einsum`, `multi_head_attention_forward`, a backward), but for some.
_IN_C = {
    BuiltinFunctionType,
    GetSetDescriptorType,
    MethodDescriptorType,
    MethodWrapperType,
    WrapperDescriptorType,
}
# fmt: off
_IN_PYTHON = frozenset((
    "silu", "relu", "relu6", "elu", "leaky_relu", "mish", "hardswish", "hardsigmoid", "hardtanh",
    "softmax", "log_softmax", "glu", "layer_norm", "rms_norm", "group_norm", "batch_norm",
    "instance_norm", "dropout", "dropout1d", "dropout2d", "dropout3d", "embedding", "normalize",
    "split", "__rsub__", "__rdiv__", "__rpow__", "__len__",
))
_OF_PRODUCTS = frozenset((
    "linear", "matmul", "linalg_matmul", "linalg_multi_dot", "linalg_matrix_power", "matrix_power",
    "inner", "cov", "corrcoef", "conv1d", "conv2d", "conv3d", "conv_transpose1d",
    "conv_transpose2d", "conv_transpose3d", "lstm", "gru", "rnn_tanh", "rnn_relu", "lstm_cell",
    "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
))
# fmt: on


def _names(operations: frozenset[Any]) -> frozenset[str]:
    return frozenset(operation.overloadpacket.__name__ for operation in operations)


_CALLS: dict[str, frozenset[str]] = {
    "recompute_saving_attention": _names(ATTENTION | ROUTING) | {"scaled_dot_product_attention"},
    "recompute_saving": _names(ATTENTION | PRODUCTS | ROUTING)
    | _OF_PRODUCTS
    | {"scaled_dot_product_attention"},
}
