"""Which results a partly recomputed block keeps: the ones that cost most to compute again.

What attention and matrix products gave is kept, all that
is pointwise is computed again. The choice of a router's top-k is always kept, or near-ties could
send tokens to other experts in the recompute (pytorch/torchtitan#1117).

Note: [Narrow contexts]
Torch's selective checkpoint contexts are dispatch modes: Python for each operation, in forward and
in the recompute. In a Llama block of width 256 on a CPU that took as long as the attention which it
spared. They serve compiled code, where they cost nothing. Elsewhere, modes of our own (see
`keeping`) stand around those calls alone that may come to a kept result, and a function mode, which
costs a quarter and is asked once for a `linear` or a `silu`, tells which. What no function mode
sees (the inside of TorchScript, and of what `torch.compile` made) is computed again.
"""

import sys
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

from lightning_ckpt.core._torch import ATTENTION, PRODUCTS, ROUTING
from lightning_ckpt.core.keeping import Keeping, Taking, place_of

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
        mode: what stands around those calls.
        saving: what it keeps or takes.
    """

    def __init__(self, mode: Keeping | Taking, saving: Saving) -> None:
        super().__init__()
        self._mode = mode
        self._names = _CALLS[saving]

    def run(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Call `function` in this context; the places of calls are told from here."""
        with self:
            return function(*args, **kwargs)

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
        self._mode.place = place_of(sys._getframe(1), _RUN)
        with self._mode:
            return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Keep nothing meanwhile: a block that runs backward inside its forward is computed again
        in the middle of it, and what that gives is not what the recompute will ask for."""
        self._mode.on = False
        try:
            yield
        finally:
            self._mode.on = True


_RUN = Narrow.run.__code__


def narrow_contexts(saving: Saving) -> tuple[Narrow, Narrow]:
    """Those of `contexts`, which cost less. Not for compiled code."""
    keeping = Keeping(SAVED[saving])
    return Narrow(keeping, saving), Narrow(Taking(keeping), saving)


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
