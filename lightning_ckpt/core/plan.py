"""What happens to each block, as plain data that needs no model."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

Action = Literal["recompute", "keep"]


@dataclass(frozen=True)
class BlockPlan:
    """What happens to one block.

    Attributes:
        name: fully qualified name in the module that the plan was made for.
        class_name: name of the block's class.
        action: "recompute" (drop the activations, compute them again in backward) or "keep".
        offload: where what the block saves for backward waits for it ("host", "disk"): the inputs
            of a block that is computed again, all that a kept one saves. None: on the device.
    """

    name: str
    class_name: str
    action: Action
    offload: str | None = None


@dataclass(frozen=True)
class Plan:
    """What happens to every block of a model, in the order of `model.modules()`.

    Attributes:
        blocks: one entry per block.
        every_n: the interval that the plan was made from.
        notes: sentences for the user about what was met on the way.
    """

    blocks: tuple[BlockPlan, ...]
    every_n: int
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[BlockPlan]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the blocks that are computed again in backward."""
        return tuple(block.name for block in self.blocks if block.action == "recompute")

    @property
    def num_recomputed(self) -> int:
        """How many blocks are computed again in backward."""
        return len(self.recomputed)

    @property
    def offload(self) -> str | None:
        """Where saved tensors go ("host", "disk"), None if they stay on the device."""
        return next((block.offload for block in self.blocks if block.offload), None)

    def to_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists and strings, for a logger or a file."""
        return {
            "every_n": self.every_n,
            "blocks": [asdict(block) for block in self.blocks],
            "notes": list(self.notes),
        }


def check_every_n(every_n: int) -> int:
    """Return `every_n` if it is a whole number of at least 1.

    Raises:
        TypeError: it is no int (a bool, float, string or None).
        ValueError: it is below 1.
    """
    hint = "use 1 for every block, 4 for blocks 0, 4, 8, ..."
    if isinstance(every_n, bool) or not isinstance(every_n, int):
        raise TypeError(f"every_n must be an int of at least 1, got {every_n!r}; {hint}")
    if every_n < 1:
        raise ValueError(f"every_n must be at least 1, got {every_n}; {hint}")
    return every_n


def every_n_plan(
    blocks: Sequence[tuple[str, str]],
    every_n: int,
    offload: str | None,
    notes: Sequence[str] = (),
    scope: str = "inputs",
) -> Plan:
    """Plan to recompute block `i` when `i % every_n == 0` and keep the others.

    Args:
        blocks: (name, class name) of each block, in order.
        every_n: the interval, at least 1.
        offload: where saved tensors wait for backward, None: on the device.
        notes: sentences for the user, carried in the plan.
        scope: whose saved tensors: "inputs" (of recomputed blocks), "kept" (blocks) or "all".
    """
    check_every_n(every_n)
    of_recomputed = None if scope == "kept" else offload
    of_kept = None if scope == "inputs" else offload
    return Plan(
        tuple(
            BlockPlan(name, class_name, "recompute", of_recomputed)
            if index % every_n == 0
            else BlockPlan(name, class_name, "keep", of_kept)
            for index, (name, class_name) in enumerate(blocks)
        ),
        every_n,
        tuple(notes),
    )
