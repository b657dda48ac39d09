"""What a person reads in the terminal: the one file that prints."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from lightning_ckpt.core.estimate import Estimate
from lightning_ckpt.core.offload import OffloadReport
from lightning_ckpt.core.plan import BlockPlan, Plan
from lightning_ckpt.core.report import Difference, Report
from lightning_ckpt.rows import estimate_rows, short_names, split_name


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
    console.print(_title(plan), style="bold", markup=False, highlight=False)
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
    for (_, class_name), group in groupby(plan, key=_family):
        for cells, blocks in (_interval_rows if plan.every_n else _action_rows)(list(group)):
            table.add_row(class_name, *cells, *([_waiting_place(blocks)] if plan.offload else []))
    return table


_Rows = Iterator[tuple[tuple[str, ...], list[BlockPlan]]]


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
        f"blocks {_num_whole(before)} were recomputed as a whole, from now on {_num_whole(now)}",
        style="yellow",
        markup=False,
        highlight=False,
    )


def _num_whole(plan: Plan) -> int:
    return sum(block.action == "recompute" for block in plan)


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


def _title(plan: Plan) -> str:
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
