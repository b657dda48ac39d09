"""What `verify` found, as plain data that needs no model."""

from dataclasses import dataclass, field
from typing import Literal

What = Literal["error", "loss", "gradient", "state", "generator"]


@dataclass(frozen=True)
class Difference:
    """One thing that a plain and a checkpointed step do not have alike.

    Attributes:
        what: "error" (the checkpointed step raised), "loss", "gradient" (of a parameter), "state"
            (a buffer, an attribute, a parameter that the forward changed) or "generator" (of random
            numbers).
        name: of the parameter, the buffer, ...
        detail: how it differs.
        blocks: names of the blocks that it comes from: each makes this difference when it alone is
            checkpointed. Empty if no single one does.
        in_plain_too: two plain steps from one state do not have it alike either: a kernel that is
            not deterministic, or state that nobody can put back (in a closure, a global, a file).
            Then `blocks` is where it begins, empty if that lies in no block.
    """

    what: What
    name: str
    detail: str
    blocks: tuple[str, ...] = ()
    in_plain_too: bool = False


@dataclass(frozen=True)
class Report:
    """What `verify` found.

    Attributes:
        differences: empty if the two steps are the same, bit by bit.
        recomputes: how often each block was computed again, by name, in the order of the model
            (compiled blocks are not seen: 0).
        compared: how many values of each kind were held against each other.
        plain_peak_bytes, checkpointed_peak_bytes: the most bytes that the step had live at once,
            beyond those that were live before it; None where the device gives no figure.
    """

    differences: tuple[Difference, ...]
    recomputes: dict[str, int]
    compared: dict[str, int] = field(default_factory=dict)
    plain_peak_bytes: int | None = None
    checkpointed_peak_bytes: int | None = None

    @property
    def ok(self) -> bool:
        """Whether nothing differs."""
        return not self.differences
