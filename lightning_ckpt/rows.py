"""What the tables say, as plain words: names, and the rows of an estimate."""

from collections.abc import Sequence
from itertools import groupby

from lightning_ckpt.core.budget.words import format_bytes
from lightning_ckpt.core.estimate import Estimate, Point

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
