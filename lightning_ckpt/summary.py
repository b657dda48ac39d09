"""What a person reads in the terminal: the one file that prints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_ckpt.core.estimate import Estimate
from lightning_ckpt.core.offload import OffloadReport
from lightning_ckpt.core.plan import Plan
from lightning_ckpt.core.report import Report
from lightning_ckpt.rows import (
    counted,
    estimate_rows,
    num_whole,
    origin,
    plan_rows,
    plan_title,
    verdict,
)


def print_plan(plan: Plan, console: Console | None = None, *, after_progress: bool = False) -> None:
    """Print what happens to the blocks, one row for each run of blocks of one class; where the plan
    was not made from an interval, one for each action in it.

    Args:
        plan: the plan in force.
        console: where to print; a terminal of the usual kind by default.
        after_progress: begin on a line of its own, below a progress bar.
    """
    console = console or Console()
    if after_progress and console.is_terminal:
        console.print()
    console.print(plan_title(plan), style="bold", markup=False, highlight=False)
    console.print(_plan_table(plan))
    for note in plan.notes:
        print_note(note, console)


def print_measuring(plan: Plan, budget: Any, console: Console | None = None) -> None:
    """Print, in one line, that the first step is only measured.

    Args:
        plan: of that step.
        budget: in the user's word.
        console: where to print; a terminal of the usual kind by default.
    """
    text = (
        f"PartialCheckpoint: the first step recomputes all {len(plan)} blocks, to plan for {budget}"
    )
    (console or Console()).print(text, style="bold", markup=False, highlight=False)


def _plan_table(plan: Plan) -> Table:
    table = Table()
    table.add_column("Block class", overflow="fold")
    table.add_column("Recomputed", justify="right" if plan.every_n else "left")
    if not plan.every_n:
        table.add_column("Blocks", justify="right")
    table.add_column("Which", overflow="fold")
    if plan.offload:
        table.add_column("Saved tensors wait")
    for row in plan_rows(plan):
        table.add_row(*row)
    return table


def print_estimate(
    estimate: Estimate, console: Console | None = None, *, all_rows: bool = False
) -> None:
    """Print what plans are predicted to cost: intervals, the planner's front, and the choices for
    budgets.

    Args:
        estimate: from `lightning_ckpt.estimate`.
        console: where to print; a terminal of the usual kind by default.
        all_rows: each interval and each plan of the front, of which else some are shown.
    """
    console = console or Console()
    table = Table()
    table.add_column("Plan")
    for title in ("Recomputed", "In part", "Kept", "Peak", "Step time"):
        table.add_column(title, justify="right")
    parts, left_out = estimate_rows(estimate, all_rows)
    for rows in parts:
        for row in rows:
            table.add_row(*row)
        table.add_section()
    console.print(table)
    if left_out:
        console.print(f"{left_out} more rows with all_rows=True", markup=False, highlight=False)


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


def print_survived(
    place: tuple[int, int], before: Plan, now: Plan, num_tries: int, console: Console | None = None
) -> None:
    """Print one line: a batch ran out of memory and was repeated under a tighter plan.

    Args:
        place: epoch and index of the batch.
        before: the plan that it was begun with.
        now: the plan that it passed with.
        num_tries: how often it was repeated.
        console: where to print; a terminal of the usual kind by default.
    """
    times = "once" if num_tries == 1 else f"{num_tries} times"
    (console or Console(soft_wrap=True)).print(
        f"Out of memory in epoch {place[0]}, batch {place[1]}, repeated {times}: of {len(before)} "
        f"blocks {num_whole(before)} were recomputed as a whole, from now on {num_whole(now)}",
        style="yellow",
        markup=False,
        highlight=False,
    )


def print_report(report: Report, console: Console | None = None) -> None:
    """Print what `verify` compared and counted, and a row for each thing that differs.

    Args:
        report: what it found.
        console: where to print; a terminal of the usual kind by default.
    """
    console = console or Console()
    console.print(verdict(report), style="bold", markup=False, highlight=False)
    console.print(counted(report), markup=False, highlight=False)
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
