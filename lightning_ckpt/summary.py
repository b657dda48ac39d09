"""What a person reads in the terminal: the one file that prints."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_ckpt.core.budget import format_bytes
from lightning_ckpt.core.estimate import Estimate, Point
from lightning_ckpt.core.offload import OffloadReport
from lightning_ckpt.core.plan import BlockPlan, Plan
from lightning_ckpt.core.report import Difference, Report


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """Print what happens to the blocks, one row for each run of blocks of one class; where the plan
    was not made from an interval, one for each action in it.

    Args:
        plan: the plan in force.
        console: where to print; a terminal of the usual kind by default.
    """
    console = console or Console()
    table = _interval_table(plan) if plan.every_n else _action_table(plan)
    console.print(_title(plan), style="bold", markup=False, highlight=False)
    console.print(table)
    for note in plan.notes:
        print_note(note, console)


def _interval_table(plan: Plan) -> Table:
    table = Table()
    table.add_column("Block class")
    table.add_column("Recomputed", justify="right")
    table.add_column("Which", overflow="fold")
    table.add_column("Saved tensors wait")
    for (_, class_name), group in groupby(plan, key=_family):
        blocks = list(group)
        recomputed = [block for block in blocks if block.action != "keep"]
        table.add_row(
            class_name,
            f"{len(recomputed)} of {len(blocks)}",
            short_names([block.name for block in recomputed]),
            _waiting_place(blocks),
        )
    return table


def _action_table(plan: Plan) -> Table:
    table = Table()
    table.add_column("Block class")
    table.add_column("In backward")
    table.add_column("Blocks", justify="right")
    table.add_column("Which", overflow="fold")
    table.add_column("Saved tensors wait")
    for (_, class_name), group in groupby(plan, key=_family):
        blocks = list(group)
        for action, what in _ACTIONS.items():
            same = [block for block in blocks if block.action == action]
            if same:
                names = short_names([block.name for block in same])
                table.add_row(class_name, what, str(len(same)), names, _waiting_place(same))
    return table


_ACTIONS = {
    "keep": "kept",
    "recompute": "recomputed",
    "recompute_saving": "recomputed but for attention and products",
    "recompute_saving_attention": "recomputed but for attention",
}


def print_estimate(estimate: Estimate, console: Console | None = None) -> None:
    """Print what plans are predicted to cost: intervals, the planner's front, and the choices for
    budgets.

    Args:
        estimate: from `lightning_ckpt.estimate`.
        console: where to print; a terminal of the usual kind by default.
    """
    table = Table()
    table.add_column("Plan")
    table.add_column("Blocks recomputed", justify="right")
    table.add_column("Peak", justify="right")
    table.add_column("Step time", justify="right")
    for points in (estimate.every_n, estimate.front, estimate.budgets):
        for point in points:
            table.add_row(*_cells(point))
        table.add_section()
    (console or Console()).print(table)


def _cells(point: Point) -> tuple[str, str, str, str]:
    peak = format_bytes(point.peak, up=True)
    if point.plan is None:
        return point.label, "-", f"needs {peak}", "-"
    blocks = f"{point.plan.num_recomputed} of {len(point.plan)}"
    return point.label, blocks, peak, f"{point.relative_time:.3f}"


def print_note(note: str, console: Console | None = None) -> None:
    """Print a sentence for the user."""
    (console or Console()).print(f"Note: {note}", style="yellow", markup=False, highlight=False)


def print_batches(
    counts: Mapping[str, int], size: str, plan: Plan, console: Console | None = None
) -> None:
    """Print how plans followed the sizes of batches, and the plan of the largest.

    Args:
        counts: of batches that were "measured", and of those of which "none", "some" or "all"
            blocks were recomputed.
        size: of the largest batch, in words.
        plan: its plan.
        console: where to print; a terminal of the usual kind by default.
    """
    console = console or Console()
    console.print(
        f"PartialCheckpoint, batches by size: {counts.get('none', 0):,} with no block recomputed, "
        f"{counts.get('some', 0):,} with some, {counts.get('all', 0):,} with all, and "
        f"{counts.get('measured', 0):,} measured. The largest had {size}; its plan:",
        style="bold",
        markup=False,
        highlight=False,
    )
    print_plan(plan, console)


def print_offload(report: OffloadReport, console: Console | None = None) -> None:
    """Print what was offloaded, as sentences."""
    console = console or Console()
    console.print("Offload, first step:", style="bold", markup=False, highlight=False)
    for sentence in report.sentences():
        console.print(f"- {sentence}", markup=False, highlight=False)


def print_report(report: Report, console: Console | None = None) -> None:
    """Print what `verify` compared and counted, and a row for each thing that differs.

    Args:
        report: what it found.
        console: where to print; a terminal of the usual kind by default.
    """
    console = console or Console()
    console.print(_verdict(report), style="bold", markup=False, highlight=False)
    console.print(_counts(report), markup=False, highlight=False)
    if report.ok:
        return
    table = Table()
    for title in ("Differs", "Name", "How", "Comes from"):
        table.add_column(title, overflow="fold")
    for difference in report.differences:
        table.add_row(
            difference.what,
            Text(difference.name),
            Text(difference.detail),
            Text(origin(difference)),
        )
    console.print(table)


def origin(difference: Difference) -> str:
    """Where a difference comes from, in words."""
    blocks = short_names(difference.blocks)
    if difference.in_plain_too:
        return f"plain training, begins in {blocks or 'no block'}"
    return blocks or "no block alone"


def _verdict(report: Report) -> str:
    if report.ok and not any(report.recomputes.values()):
        return "verify: the two steps are the same, but no block was seen to be computed again"
    if report.ok:
        return "verify: the checkpointed step is the plain step, bit by bit"
    num_plain = sum(difference.in_plain_too for difference in report.differences)
    return (
        f"verify: {len(report.differences)} values differ between the plain and the checkpointed "
        f"step ({num_plain} of them between two plain steps, too)"
    )


def _counts(report: Report) -> str:
    compared = ", ".join(f"{number} {what}" for what, number in report.compared.items())
    num_recomputed = sum(number > 0 for number in report.recomputes.values())
    peaks = (report.plain_peak_bytes, report.checkpointed_peak_bytes)
    plain, ours = ("unknown" if p is None else f"{p / 2**20:.3g} MiB" for p in peaks)
    return (
        f"Compared: {compared}. Recomputed: {num_recomputed} of {len(report.recomputes)} blocks, "
        f"{sum(report.recomputes.values())} times. Peak of the step: {plain} plain, "
        f"{ours} checkpointed."
    )


def short_names(names: Sequence[str]) -> str:
    """Shorten names that differ by a number: `layers.0, layers.4` becomes `layers.{0,4}`."""
    parts = (_split(name) for name in names)
    return ", ".join(
        _braces(prefix, [number for _, number in group])
        for prefix, group in groupby(parts, key=lambda part: part[0])
    )


def _title(plan: Plan) -> str:
    interval = f" (every_n={plan.every_n})" if plan.every_n else ""
    return (
        f"PartialCheckpoint: {plan.num_recomputed} of {len(plan)} blocks are recomputed in backward"
        f"{interval}"
    )


def _family(block: BlockPlan) -> tuple[str, str]:
    return _split(block.name)[0], block.class_name


def _waiting_place(blocks: Sequence[BlockPlan]) -> str:
    """Where the saved tensors of these blocks are until backward."""
    places = {
        (block.offload or "on the device", "kept" if block.action == "keep" else "recomputed")
        for block in blocks
    }
    if len({place for place, _ in places}) == 1:
        return places.pop()[0]
    return ", ".join(f"{place} ({kind})" for place, kind in sorted(places))


def _split(name: str) -> tuple[str, str]:
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


def print_epochs(rows: Sequence[Mapping[str, Any]], console: Console | None = None) -> None:
    """Print the table of `PeakMemoryMonitor`.

    Args:
        rows: those of its `summary()`.
        console: where to print; a terminal of the usual kind by default.
    """
    table = Table("Epoch", title="Peak memory", title_justify="left", title_style="bold")
    columns = [column for column in _COLUMNS if any(row.get(column[1]) is not None for row in rows)]
    for title, _, _ in columns:
        table.add_column(title, justify="left" if title == "Blocks" else "right")
    if any(row["rank"] for row in rows):
        columns = [*columns, ("Rank", "rank", "d")]
        table.add_column("Rank", justify="right")
    for row in rows:
        table.add_row(str(row["epoch"]), *(_cell(row.get(key), form) for _, key, form in columns))
    (console or Console()).print(table)


def print_held(held: Mapping[str, int], rank: int, console: Console | None = None) -> None:
    """Print what held the memory when it ran out.

    Args:
        held: bytes by what holds them.
        rank: of this process.
        console: where to print; a terminal of the usual kind by default.
    """
    title = f"Memory when it ran out (rank {rank})"
    table = Table("Held by", title=title, title_justify="left", title_style="bold")
    table.add_column("MiB", justify="right")
    for name, num_bytes in held.items():
        table.add_row(name.replace("_", " "), f"{num_bytes / 2**20:,.1f}")
    table.add_section()
    table.add_row("all", f"{sum(held.values()) / 2**20:,.1f}")
    (console or Console()).print(table)


def print_picture(path: Path, console: Console | None = None) -> None:
    """Print where a picture lies, on one line however long it is."""
    console = console or Console()
    console.print(f"picture: {path}", markup=False, highlight=False, soft_wrap=True)


# Title, key of a row, format.
_COLUMNS = (
    ("Peak MiB", "peak_allocated_MiB", ",.1f"),
    ("Activations MiB", "activations_MiB", ",.1f"),
    ("Host MiB", "peak_host_MiB", ",.1f"),
    ("s/step", "step_s", ".3f"),
    ("Blocks", "plan", ""),
)


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)
