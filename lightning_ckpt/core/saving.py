"""Which results a partly recomputed block keeps: the ones that cost most to compute again.

By torch's selective checkpoint contexts. What attention and matrix products gave is kept, all that
is pointwise is computed again. The choice of a router's top-k is always kept, or near-ties could
send tokens to other experts in the recompute (pytorch/torchtitan#1117).
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Literal, cast

from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    create_selective_checkpoint_contexts,
)

from lightning_ckpt.core._torch import ATTENTION, PRODUCTS, ROUTING

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
