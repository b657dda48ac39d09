"""A budget in the user's words, and bytes for people."""

import re
from typing import Any, NamedTuple

import torch

_UNITS = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_MARGIN = 0.05  # of the free memory: what "auto" leaves to fragments and to other libraries


class Budget(NamedTuple):
    """How much memory the peak of a step may take.

    Attributes:
        kind: "bytes", "share" of the device's memory, or "auto" (what is free when fit starts).
        amount: how many bytes, or which share.
    """

    kind: str
    amount: float


def read_budget(budget: Any) -> Budget:
    """What the user's word says.

    Args:
        budget: bytes as an int or as a word (`"14GiB"`, `"500 MB"`), a share of the device's
            memory as a float above 0 and up to 1, or "auto".

    Raises:
        TypeError: it is of another kind.
        ValueError: it is a word that is not known, or a number that is impossible.
    """
    forms = "use bytes ('14GiB', 500_000_000), a share of the device (0.9), or 'auto'"
    if isinstance(budget, str):
        if budget == "auto":
            return Budget("auto", 0)
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?)\s*([A-Za-z]+)\s*", budget)
        unit = _UNITS.get(match[2].lower()) if match else None
        if match is None or unit is None:
            raise ValueError(f"budget={budget!r} is not known; {forms}")
        return _positive(Budget("bytes", int(float(match[1]) * unit)), budget, forms)
    if isinstance(budget, bool) or not isinstance(budget, (int, float)):
        raise TypeError(f"budget must be a number or a word, got {budget!r}; {forms}")
    if isinstance(budget, int):
        return _positive(Budget("bytes", budget), budget, forms)
    if not 0 < budget <= 1:
        raise ValueError(f"budget={budget!r} is no share of a device; {forms}")
    return Budget("share", budget)


def _positive(read: Budget, budget: Any, forms: str) -> Budget:
    if read.amount < 1:
        raise ValueError(f"budget={budget!r} must be above 0; {forms}")
    return read


def budget_bytes(budget: Budget, device: torch.device) -> int:
    """How many bytes that is on `device`, now.

    Raises:
        ValueError: a share of, or what is free on, a device that does not say how much it has.
    """
    if budget.kind == "bytes":
        return int(budget.amount)
    word = "'auto'" if budget.kind == "auto" else repr(budget.amount)
    memory: Any = None if device.type == "cpu" else torch.get_device_module(device)
    if not hasattr(memory, "mem_get_info"):
        raise ValueError(
            f"budget={word} needs a device that knows how much memory it has, and this is "
            f"{device.type}; give bytes, such as budget='4GiB'"
        )
    free, total = memory.mem_get_info(device)
    if budget.kind == "share":
        return int(budget.amount * total)
    # What our allocator has taken from the device is not free there, and ours all the same.
    return int((1 - _MARGIN) * (free + memory.memory_reserved(device)))


def format_bytes(num_bytes: int, *, up: bool = False) -> str:
    """Bytes for people: `126.3 MiB`; rounded up if what they read must be enough."""
    unit, size = next(
        (u, s)
        for u, s in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10), ("bytes", 1))
        if num_bytes >= s or s == 1
    )
    if size == 1:
        return f"{num_bytes} bytes"
    tenths = -(-num_bytes * 10 // size) if up else round(num_bytes * 10 / size)
    return f"{tenths / 10:.1f} {unit}"


class BudgetTooSmall(ValueError):
    """No plan is within the budget.

    Attributes:
        budget: bytes that were given.
        least: bytes that would do.
        terms: what the peak of the least plan is made of, bytes by name, the largest first.
        with_offload: bytes that would do with all of offload, if that was not allowed and is less.
        way: words for how that is allowed.
        batch: the one that it is about, in words.
    """

    def __init__(
        self,
        budget: int,
        least: int,
        terms: dict[str, int],
        batch: str = "",
        with_offload: int | None = None,
        way: str = "",
    ) -> None:
        self.budget, self.least, self.terms = budget, least, terms
        self.with_offload, self.way = with_offload, way
        largest = ", ".join(f"{name} {format_bytes(n)}" for name, n in list(terms.items())[:3])
        hint = ""
        if with_offload is not None:
            hint = f"; with {way} {format_bytes(with_offload, up=True)} would do"
        super().__init__(
            f"budget={format_bytes(budget)} is less than any plan needs"
            f"{batch and ' for a batch with '}{batch}: give at least "
            f"{format_bytes(least, up=True)} ({least} bytes){hint}. The largest terms are {largest}"
        )

    def about(self, batch: str) -> "BudgetTooSmall":
        """The same, of a batch in words."""
        args = self.budget, self.least, self.terms, batch, self.with_offload, self.way
        return BudgetTooSmall(*args)
