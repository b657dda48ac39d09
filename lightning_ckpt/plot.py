"""Pictures of memory: the peak of each epoch by its parts, one step over time, and what plans would
take."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from os import PathLike
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from lightning_ckpt.core.estimate import Estimate
from lightning_ckpt.core.memory.breakdown import PARTS
from lightning_ckpt.core.memory.timeline import Timeline
from lightning_ckpt.epoch_memory import PLAIN

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours, which the colour-blind can tell apart.
_PART_COLOURS = {
    "parameters": "#0072B2",
    "gradients": "#56B4E9",
    "optimizer_states": "#009E73",
    "buffers": "#999999",
    "activations": "#E69F00",
    "other": "#DDDDDD",
}
_KIND_COLOURS = {
    "forward": "#E69F00",
    "recompute": "#D55E00",
    "backward": "#0072B2",
    "optimizer": "#009E73",
}
_PART_LABELS = {
    "optimizer_states": "optimizer states",
    "other": "other (batch, temporaries)",
}

_TITLE_WIDTH = 90  # letters that fit beside each other


def save_picture(
    path: Path, rows: Sequence[Mapping[str, Any]], timeline: Timeline | None = None
) -> None:
    """Draw and save.

    Args:
        path: a PNG file; its directory is made.
        rows: those of `PeakMemoryMonitor.summary()`; epochs without a figure are passed over.
        timeline: one step.
    """
    from matplotlib.figure import Figure

    measured = [row for row in rows if row.get("peak_allocated_MiB") is not None]
    figure = Figure(figsize=(10, 10 if timeline else 4.5), layout="constrained")
    if timeline is None:
        _draw_epochs(figure.subplots(), measured)
    else:
        heights = (3, 3, 2 if timeline.block_names else 0.01)
        epochs, live, blocks = figure.subplots(3, 1, height_ratios=heights)
        _draw_epochs(epochs, measured)
        _draw_step(live, timeline)
        _draw_blocks(blocks, timeline)
        blocks.sharex(live)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_epochs(axes: "Axes", rows: Sequence[Mapping[str, Any]]) -> None:
    epochs = [row["epoch"] for row in rows]
    bottom = [0.0] * len(rows)
    width = 0.8 * min((b - a for a, b in pairwise(epochs)), default=1)
    for part in PARTS:
        heights = [row.get(f"{part}_at_peak_MiB", 0.0) for row in rows]
        if any(heights):
            label, colour = _PART_LABELS.get(part, part), _PART_COLOURS[part]
            axes.bar(epochs, heights, width, bottom, label=label, color=colour)
            bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    if not any(bottom):  # no breakdown
        peaks = [row["peak_allocated_MiB"] for row in rows]
        axes.bar(epochs, peaks, width, label="peak", color=_PART_COLOURS["parameters"])
    plan = f" ({rows[-1]['plan']})" if rows and rows[-1]["plan"] != PLAIN else ""
    title = f"Peak memory of each epoch, and what it was made of{plan}"
    axes.set_title(fill(title, _TITLE_WIDTH), loc="left")
    axes.set_xlabel("epoch")
    axes.set_ylabel("MiB")
    axes.set_xticks(epochs if len(epochs) <= 20 else epochs[:: len(epochs) // 10])
    axes.set_xlim(min(epochs, default=0) - 0.6 * width / 0.8, max(epochs, default=0) + 0.75 * width)
    _legend(axes, reverse=True)


def _draw_step(axes: "Axes", timeline: Timeline) -> None:
    times = [1000 * time for time, _ in timeline.points]
    live = [num_bytes / 2**20 for _, num_bytes in timeline.points]
    axes.step(times, live, where="post", color="black", linewidth=0.8)
    axes.fill_between(times, live, step="post", color="#BBBBBB", alpha=0.6, linewidth=0)
    highest = max(live, default=0.0)
    end = max([*times, *(1000 * span.end for span in timeline.phases)], default=1.0)
    for kind, start, stop, _ in timeline.phases:
        label = None if kind in axes.get_legend_handles_labels()[1] else kind
        axes.axvspan(
            1000 * start,
            1000 * stop,
            color=_KIND_COLOURS[kind],
            alpha=0.2,
            linewidth=0,
            label=label,
        )
    _mark_peak(axes, times, live, end)
    axes.set_title("One training step: memory in use", loc="left")
    axes.set_ylabel("MiB")
    axes.set_ylim(0, 1.15 * highest or 1)
    axes.set_xlim(0, end)
    _legend(axes)
    axes.set_xlabel("milliseconds since the step began")


def _mark_peak(axes: "Axes", times: Sequence[float], live: Sequence[float], end: float) -> None:
    at = max(range(len(live)), key=live.__getitem__, default=None)
    if at is not None:
        axes.plot(times[at], live[at], "o", color="black", markersize=4)
        is_late = times[at] > end / 2  # words after it would lie on the legend
        axes.annotate(
            f"peak {live[at]:,.1f} MiB",
            (times[at], live[at]),
            (-6 if is_late else 6, 6),
            textcoords="offset points",
            ha="right" if is_late else "left",
        )


def _draw_blocks(axes: "Axes", timeline: Timeline) -> None:
    if not timeline.block_names:
        axes.set_axis_off()
        return
    for kind in ("forward", "backward", "recompute"):  # a recompute lies inside a backward
        spans = [span for span in timeline.blocks if span.kind == kind]
        if not spans:
            continue
        axes.barh(
            [float(span.block or 0) for span in spans],
            [1000 * (span.end - span.start) for span in spans],
            left=[1000 * span.start for span in spans],
            color=_KIND_COLOURS[kind],
            label=kind,
        )
    count = len(timeline.block_names)
    axes.set_yticks(range(0, count, max(1, count // 12)))
    axes.set_ylim(count - 0.4, -0.6)
    axes.set_title("When each block ran", loc="left")
    axes.set_ylabel("block")
    axes.set_xlabel("milliseconds since the step began")
    _legend(axes)


def _legend(axes: "Axes", reverse: bool = False) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False, fontsize=9, reverse=reverse
        )
    axes.spines[["top", "right"]].set_visible(False)


def draw_estimate(estimate: Estimate, path: str | PathLike[str]) -> None:
    """Draw step time against peak memory into an image file, of the kind that its name says.

    Args:
        estimate: from `lightning_ckpt.estimate`.
        path: the file, such as "plans.png"; its directory is made.

    Raises:
        ImportError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("drawing needs matplotlib: pip install 'lightning-ckpt[plot]'") from error
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    kinds: Any = (
        ("every_n", estimate.every_n, {"marker": "o", "linestyle": "", "color": "#0072B2"}),
        ("planned", estimate.front, {"marker": ".", "color": "#E69F00"}),
        ("for a budget", estimate.budgets, {"marker": "*", "linestyle": "", "color": "#009E73"}),
    )
    highest = max(point.peak for point in estimate.every_n)
    unit, size = ("GiB", 2**30) if highest >= 2 * 2**30 else ("MiB", 2**20)
    for label, points, style in kinds:
        shown = [point for point in points if point.plan is not None]
        if shown:
            peaks, times = zip(*((p.peak / size, p.relative_time) for p in shown), strict=True)
            large = 14 if label == "for a budget" else 6
            axes.plot(peaks, times, **style, drawstyle="steps-post", label=label, markersize=large)
    axes.set_xlabel(f"peak memory of a step, {unit}")
    axes.set_ylabel("step time, plain training = 1")
    axes.legend()
    axes.grid(alpha=0.3)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
