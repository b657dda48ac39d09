"""What the terminal says, as plain words: names, sentences, and the cells of tables."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from lightning_ckpt.core.budget.words import format_bytes
from lightning_ckpt.core.estimate import Estimate, Point
from lightning_ckpt.core.plan import BlockPlan, Plan
from lightning_ckpt.core.report import Difference, Report

NUM_ROWS = 12  # of the intervals, and of the front
Row = tuple[str, ...]


def estimate_rows(estimate: Estimate, all_rows: bool) -> tuple[list[list[Row]], int]:
    """The cells of the parts of the table (plan, blocks recomputed, in part and not, peak, step
    time), and how many rows were left out."""
    parts = [
        _merged_rows([_cells(point) for point in points])
        for points in (estimate.every_n, estimate.front)
    ]
    shown = parts if all_rows else [_some(rows) for rows in parts]
    left_out = sum(map(len, parts)) - sum(map(len, shown))
    return [*shown, [_cells(point) for point in estimate.budgets]], left_out


def _merged_rows(rows: Sequence[Row]) -> list[Row]:
    """Neighbours that cost the same in one row: `every_n=10` and `every_n=9` as `every_n=9, 10`."""
    merged: list[Row] = []
    for cells, same in groupby(rows, key=lambda row: row[1:]):
        labels = list(dict.fromkeys(row[0] for row in same))
        numbers = [label.rpartition("=")[2] for label in reversed(labels)]
        one = len(labels) == 1
        merged.append((labels[0] if one else f"every_n={_first_and_last(numbers)}", *cells))
    return merged


def _first_and_last(numbers: list[str]) -> str:
    return ", ".join(numbers) if len(numbers) == 2 else f"{numbers[0]} to {numbers[-1]}"


def _some(rows: list[Row]) -> list[Row]:
    """At most `NUM_ROWS`, evenly, with the first and the last."""
    if len(rows) <= NUM_ROWS:
        return rows
    return [rows[round(index * (len(rows) - 1) / (NUM_ROWS - 1))] for index in range(NUM_ROWS)]


def _cells(point: Point) -> Row:
    peak = format_bytes(point.peak, up=True)
    if point.plan is None:
        return point.label, "-", "-", "-", f"needs {peak}", "-"
    actions = [block.action for block in point.plan]
    whole, kept = actions.count("recompute"), actions.count("keep")
    counts = (str(whole), str(len(actions) - whole - kept), str(kept))
    return point.label, *counts, peak, f"{point.relative_time:.3f}"


def plan_rows(plan: Plan) -> Iterator[Row]:
    """The cells of each run of blocks of one class, and of each action in it where there is no
    interval: class, how many are recomputed or what of them, which, and where tensors wait."""
    for (_, class_name), group in groupby(plan, key=_family):
        for cells, blocks in (_interval_rows if plan.every_n else _action_rows)(list(group)):
            yield (class_name, *cells, *([_waiting_place(blocks)] if plan.offload else []))


_Rows = Iterator[tuple[Row, list[BlockPlan]]]


def _interval_rows(blocks: list[BlockPlan]) -> _Rows:
    recomputed = [block for block in blocks if block.action != "keep"]
    names = short_names([block.name for block in recomputed])
    yield (f"{len(recomputed)} of {len(blocks)}", names), blocks


def _action_rows(blocks: list[BlockPlan]) -> _Rows:
    for action, what in _ACTIONS.items():
        if same := [block for block in blocks if block.action == action]:
            yield (what, str(len(same)), short_names([block.name for block in same])), same


_ACTIONS = {  # what of a block is computed again
    "keep": "nothing",
    "recompute": "everything",
    "recompute_saving_attention": "all but attention",
    "recompute_saving": "only pointwise",
}


def num_whole(plan: Plan) -> int:
    """How many blocks are recomputed as a whole."""
    return sum(block.action == "recompute" for block in plan)


def origin(difference: Difference) -> str:
    """Where a difference comes from, in words."""
    blocks = short_names(difference.blocks)
    if difference.in_plain_too:
        return f"plain training, begins in {blocks or 'no block'}"
    return blocks or "no block alone"


def verdict(report: Report) -> str:
    """What `verify` found, in a sentence."""
    if report.ok and not any(report.recomputes.values()):
        return "verify: the two steps are the same, but no block was seen to be computed again"
    if report.ok:
        return "verify: the checkpointed step is the plain step, bit by bit"
    num_plain = sum(difference.in_plain_too for difference in report.differences)
    return (
        f"verify: {len(report.differences)} values differ between the plain and the checkpointed "
        f"step ({num_plain} of them between two plain steps, too)"
    )


def counted(report: Report) -> str:
    """What it compared and counted, in sentences."""
    compared = ", ".join(
        f"{number} {what}{'s' if number > 1 else ''}" for what, number in report.compared.items()
    )
    num_recomputed = sum(number > 0 for number in report.recomputes.values())
    peaks = (report.plain_peak_bytes, report.checkpointed_peak_bytes)
    plain, ours = ("unknown" if p is None else f"{p / 2**20:,.2f} MiB" for p in peaks)
    return (
        f"Compared: {compared}. Recomputed: {num_recomputed} of {len(report.recomputes)} blocks, "
        f"{sum(report.recomputes.values())} times. Peak of the step: {plain} plain, "
        f"{ours} checkpointed."
    )


def plan_title(plan: Plan) -> str:
    """What a plan does, in a line."""
    interval = f" (every_n={plan.every_n})" if plan.every_n else ""
    return (
        f"PartialCheckpoint: {plan.num_recomputed} of {len(plan)} blocks are recomputed in backward"
        f"{interval}"
    )


def _family(block: BlockPlan) -> tuple[str, str]:
    return split_name(block.name)[0], block.class_name


def _waiting_place(blocks: Sequence[BlockPlan]) -> str:
    """Where the saved tensors of these blocks are until backward."""
    places = {
        (block.offload or "on the device", "kept" if block.action == "keep" else "recomputed")
        for block in blocks
    }
    if len({place for place, _ in places}) == 1:
        return places.pop()[0]
    return ", ".join(f"{place} ({kind})" for place, kind in sorted(places))


def short_names(names: Sequence[str]) -> str:
    """Shorten names that differ by a number: `layers.0, layers.4` becomes `layers.{0,4}`."""
    parts = (split_name(name) for name in names)
    return ", ".join(
        _braces(prefix, [number for _, number in group])
        for prefix, group in groupby(parts, key=lambda part: part[0])
    )


def split_name(name: str) -> tuple[str, str]:
    """`encoder.layers.3` -> (`encoder.layers`, `3`); a name without a number has none."""
    prefix, _, last = name.rpartition(".")
    return (prefix, last) if last.isdigit() else (name, "")


def _braces(prefix: str, numbers: list[str]) -> str:
    if numbers == [""]:
        return prefix
    dot = "." if prefix else ""
    if len(numbers) == 1:
        return f"{prefix}{dot}{numbers[0]}"
    return f"{prefix}{dot}{{{','.join(_ranges([int(number) for number in numbers]))}}}"


def _ranges(numbers: list[int]) -> list[str]:
    """[0, 1, 2, 3, 7] -> ["0-3", "7"]."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [
        f"{run[0]}-{run[-1]}" if len(run) > 2 else ",".join(str(number) for number in run)
        for run in runs
    ]
