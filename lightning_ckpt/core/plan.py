"""What happens to each block, as plain data that needs no model."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

import yaml

Action = Literal["keep", "recompute", "recompute_saving", "recompute_saving_attention"]
Place = Literal["host", "disk"]
# What a planner chooses from: an action, alone or with what the block saves waiting elsewhere.
Choice = Literal[Action, "recompute_offloaded", "keep_offloaded"]


@dataclass(frozen=True)
class BlockPlan:
    """What happens to one block.

    Attributes:
        name: fully qualified name in the module that the plan was made for.
        class_name: name of the block's class.
        action: "keep" (its activations), "recompute" (drop them, compute them again in backward),
            "recompute_saving" (the same, but keep what attention and matrix products gave) or
            "recompute_saving_attention" (keep what attention gave).
        offload: where what the block saves for backward waits for it ("host", "disk"): the inputs
            of a block that is computed again, all that a kept one saves. None: on the device.
    """

    name: str
    class_name: str
    action: Action
    offload: Place | None = None


def is_offloaded(choice: Choice) -> bool:
    """Whether what the block saves waits elsewhere."""
    return choice.endswith("_offloaded")


def block_plan(name: str, class_name: str, choice: Choice, place: Place | None) -> BlockPlan:
    """What a choice means for a block, if what it saves waits in `place`."""
    action: Any = choice.removesuffix("_offloaded")
    return BlockPlan(name, class_name, action, place if is_offloaded(choice) else None)


def choice_of(block: BlockPlan) -> Choice:
    """The planner's word for it."""
    choice: Any = block.action if block.offload is None else f"{block.action}_offloaded"
    return choice


@dataclass(frozen=True)
class Plan:
    """What happens to every block of a model, in the order of `model.modules()`.

    Attributes:
        blocks: one entry per block.
        every_n: the interval that the plan was made from; None if it was made otherwise.
        notes: sentences for the user about what was met on the way.
    """

    blocks: tuple[BlockPlan, ...]
    every_n: int | None = None
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[BlockPlan]:
        return iter(self.blocks)

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def recomputed(self) -> tuple[str, ...]:
        """Names of the blocks that are computed again in backward, as a whole or in part."""
        return tuple(block.name for block in self.blocks if block.action != "keep")

    @property
    def num_recomputed(self) -> int:
        """How many blocks are computed again in backward."""
        return len(self.recomputed)

    @property
    def offload(self) -> Place | None:
        """Where saved tensors go ("host", "disk"), None if they stay on the device."""
        return next((block.offload for block in self.blocks if block.offload), None)

    def to_dict(self) -> dict[str, Any]:
        """The plan as dicts, lists and strings, for a logger or a file."""
        return {
            "every_n": self.every_n,
            "blocks": [asdict(block) for block in self.blocks],
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "Plan":
        """The plan that `to_dict` gave, or that somebody wrote.

        Args:
            data: `blocks`, a list of dicts with the fields of `BlockPlan`, of which `name` and
                `action` are needed; `every_n` and `notes` for information.

        Raises:
            TypeError: it is of another shape.
            ValueError: a key or a word is not known, a block is named twice, or they offload to
                two places.
        """
        if not isinstance(data, Mapping) or not isinstance(data.get("blocks"), Sequence):
            raise TypeError(
                f"plan must be a dict with a list of blocks, got {data!r}; see Plan.to_dict()"
            )
        _check_keys(data, {"blocks", "every_n", "notes"}, "plan")
        blocks = tuple(_read_block(entry) for entry in data["blocks"])
        names = [block.name for block in blocks]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"plan names block {name!r} twice; keep one of the two")
        if not blocks:
            raise ValueError("plan has no blocks; name each with its action")
        places = sorted({block.offload for block in blocks if block.offload})
        if len(places) > 1:
            raise ValueError(f"plan offloads to {' and '.join(places)}; choose one place")
        every_n = data.get("every_n")
        return cls(
            blocks,
            None if every_n is None else check_every_n(every_n),
            tuple(map(str, data.get("notes") or ())),
        )


PlanLike: TypeAlias = Plan | Mapping[str, Any] | str | PathLike[str]


def _read_block(entry: Any) -> BlockPlan:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("name"), str):
        raise TypeError(f"plan has a block {entry!r}; it must be a dict with at least a name (str)")
    _check_keys(entry, {field.name for field in fields(BlockPlan)}, "a block of the plan")
    action, offload = entry.get("action"), entry.get("offload")
    _check_word("action", action, get_args(Action), entry["name"])
    if offload is not None:
        _check_word("offload", offload, get_args(Place), entry["name"])
    return BlockPlan(entry["name"], str(entry.get("class_name") or ""), action, offload)  # type: ignore[arg-type]


def _check_keys(entry: Mapping[str, Any], known: set[str], what: str) -> None:
    for key in entry:
        if key not in known:
            raise ValueError(f"{what} has the key {key!r}; it takes {', '.join(sorted(known))}")


def _check_word(key: str, value: Any, words: Sequence[str], name: str) -> None:
    if value not in words:
        raise ValueError(
            f"{key}={value!r} of block {name!r} in the plan is not known; use {', '.join(words)}"
        )


def read_plan(plan: PlanLike) -> Plan:
    """A plan from what a user has: a `Plan`, a dict, or a YAML or JSON file.

    Raises:
        TypeError, ValueError: as `Plan.from_dict`; also: it is no file, or not one of these.
    """
    if isinstance(plan, Plan):
        return Plan.from_dict(plan.to_dict())  # a plan made by hand is checked as well
    if isinstance(plan, Mapping):
        return Plan.from_dict(plan)
    if not isinstance(plan, (str, PathLike)):
        raise TypeError(f"plan must be a Plan, a dict or the path of a file, got {plan!r}")
    path = Path(plan)
    if not path.is_file():
        raise ValueError(f"plan={str(plan)!r} is no file; give a YAML or JSON file of a plan")
    try:
        return Plan.from_dict(yaml.safe_load(path.read_text()))  # JSON is YAML
    except yaml.YAMLError as error:
        raise ValueError(f"plan={str(plan)!r} is neither YAML nor JSON: {error}") from error
    except (TypeError, ValueError) as error:
        raise type(error)(f"{plan}: {error}") from None


def write_plan(plan: Plan, path: str | PathLike[str]) -> None:
    """Write a plan to a file that `read_plan` takes: JSON if it is called so, else YAML."""
    path = Path(path)
    data = plan.to_dict()
    text = json.dumps(data, indent=2) if path.suffix == ".json" else yaml.safe_dump(data)
    path.write_text(text)


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


def check_switch(name: str, value: Any, hint: str = "") -> None:
    """Refuse what is neither True nor False, such as a file's name.

    Raises:
        TypeError: it is something else.
    """
    if not isinstance(value, bool):
        raise TypeError(
            f"{name} must be True or False, got {value!r}" + (f"; {hint}" if hint else "")
        )


def every_n_plan(
    blocks: Sequence[tuple[str, str]],
    every_n: int,
    offload: Place | None,
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
