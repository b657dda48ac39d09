"""The table, the picture, the snapshot, and what is said of an out-of-memory error."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import Logger
from matplotlib.figure import Figure
from matplotlib.image import imread
from monitor_helpers import (
    TRAINER_WARNS,
    Net,
    fit_rows,
    trainer,
)
from rich.console import Console
from torch import Tensor, nn

from lightning_ckpt import PartialCheckpoint, PeakMemoryMonitor, images, one_step
from lightning_ckpt.core.memory.timeline import Span, Timeline
from lightning_ckpt.plot import save_picture
from lightning_ckpt.summary import print_epochs, print_held

pytestmark = [
    *TRAINER_WARNS,
    pytest.mark.filterwarnings("ignore:.*Checkpoint directory.*:UserWarning"),
]


class Blocks(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.layer(batch).square().mean()


# --- the table


def row(epoch: int, **more: Any) -> dict[str, Any]:
    plain = {"peak_allocated_MiB": 1234.56, "step_s": 0.25, "plan": "3 of 12 blocks recomputed"}
    return {"epoch": epoch, "rank": 0, "activations_MiB": 10.0, **plain, **more}


def printed(rows: list[dict[str, Any]]) -> str:
    console = Console(file=io.StringIO(), width=100)
    print_epochs(rows, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_table() -> None:
    text = printed([row(0), row(2, peak_allocated_MiB=None)])
    assert "1,234.6" in text
    assert "0.250" in text
    assert "3 of 12 blocks recomputed" in text
    assert "Rank" not in text
    assert "Host" not in text  # nobody has that figure
    assert "│ 2     │        - │" in text
    assert "Rank" in printed([row(0), row(1, rank=3)])


def test_table_comes_at_the_end_of_fit_and_can_be_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, PeakMemoryMonitor(), max_epochs=2).fit(Net())
    out = capsys.readouterr().out
    assert out.count("Peak MiB") == 1
    assert "plain" in out
    trainer(tmp_path, PeakMemoryMonitor(table=False), max_epochs=2).fit(Net())
    assert "Peak MiB" not in capsys.readouterr().out


def test_two_monitors_of_one_kind_show_one_table_and_one_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer(tmp_path, PeakMemoryMonitor(plot=True), PeakMemoryMonitor(plot=True)).fit(Net())
    out = capsys.readouterr().out
    assert out.count("Peak MiB") == 1
    assert out.endswith(f"picture: {tmp_path / 'memory.png'}\n")
    assert out.count("picture:") == 1
    trainer(tmp_path, PeakMemoryMonitor(), PeakMemoryMonitor(every_n_epochs=2)).fit(Net())
    out = capsys.readouterr().out
    assert out.count("Peak MiB") == 2  # of other epochs
    assert "picture:" not in out


# --- the picture


def test_picture_is_saved_and_goes_to_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logger = TensorBoardLogger(tmp_path, name=None, version="run")
    peak = PeakMemoryMonitor(plot=True)
    trainer(tmp_path, peak, PartialCheckpoint(2, layers="blocks.*"), logger=logger).fit(Blocks())
    picture = imread(tmp_path / "run" / "memory.png")
    assert picture.shape == (1200, 1200, 4)
    assert picture.std() > 0.1  # not empty
    events = EventAccumulator(str(tmp_path / "run"))
    events.Reload()
    (image,) = events.Images("memory")
    shown = imread(io.BytesIO(image.encoded_image_string))
    assert (shown[..., :3] == picture[..., :3]).all()
    timeline = peak._one_step.timeline
    assert timeline is not None
    assert [span.kind for span in timeline.phases] == ["forward", "backward", "optimizer"]
    assert {span.kind for span in timeline.blocks} == {"forward", "recompute", "backward"}
    # The step after the first update, which has the optimizer's states: the peak of the epoch.
    highest = max(live for _, live in timeline.points)
    assert highest / 2**20 == pytest.approx(peak.summary()[0]["peak_allocated_MiB"], rel=0.001)


@pytest.mark.parametrize("settings", [{"fast_dev_run": True}, {"accumulate_grad_batches": 2}])
def test_picture_of_a_short_run(tmp_path: Path, settings: dict[str, Any]) -> None:
    trainer(tmp_path, PeakMemoryMonitor(plot=True, breakdown=False), **settings).fit(Net())
    assert (tmp_path / "memory.png").exists()


def test_picture_that_cannot_be_saved_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "memory.png").mkdir()
    with pytest.warns(UserWarning, match="has no picture: .*IsADirectoryError"):
        rows = fit_rows(tmp_path, Net(), PeakMemoryMonitor(plot=True))
    assert len(rows) == 2


def test_plot_without_matplotlib_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_ckpt import monitor_settings

    monkeypatch.setattr(monitor_settings, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'lightning-ckpt\[plot\]'"):
        PeakMemoryMonitor(plot=True)
    PeakMemoryMonitor()


def test_picture_has_every_part_and_phase(tmp_path: Path) -> None:
    parts = ("parameters", "gradients", "optimizer_states", "buffers", "activations", "other")
    rows = [row(epoch, **{f"{part}_at_peak_MiB": 200.0 for part in parts}) for epoch in range(3)]
    phases = (Span("forward", 0, 0.1), Span("backward", 0.1, 0.3), Span("optimizer", 0.3, 0.32))
    blocks = tuple(Span("forward", i / 1000, (i + 1) / 1000, i) for i in range(60))
    points = tuple((i / 1000, 2**20 * min(i, 320 - i)) for i in range(320))
    names = tuple(map(str, range(60)))
    save_picture(tmp_path / "many.png", rows, Timeline(points, phases, blocks, names))
    save_picture(tmp_path / "none.png", [], Timeline((), (), (), ()))
    save_picture(tmp_path / "rows.png", rows)
    assert imread(tmp_path / "many.png").shape[:2] == (1200, 1200)
    colours = {
        tuple(pixel)
        for pixel in (255 * imread(tmp_path / "rows.png")[::4, ::4, :3])
        .round()
        .astype(int)
        .reshape(-1, 3)
    }
    assert {(0, 114, 178), (86, 180, 233), (0, 158, 115), (153, 153, 153), (230, 159, 0)} <= colours


def drawn(monkeypatch: pytest.MonkeyPatch, path: Path, peak_at: float, plan: str) -> Figure:
    """The picture of a step with its peak there, laid out."""
    figures: list[Figure] = []
    save = Figure.savefig

    def keep(self: Figure, *args: Any, **values: Any) -> None:
        figures.append(self)
        save(self, *args, **values)

    monkeypatch.setattr(Figure, "savefig", keep)
    phases = (Span("forward", 0, 0.4), Span("backward", 0.4, 0.9), Span("optimizer", 0.9, 1.0))
    points = tuple((i / 100, 2**30 * (90 if i == int(100 * peak_at) else 60)) for i in range(100))
    save_picture(path / "a.png", [row(0, plan=plan)], Timeline(points, phases, (), ()))
    return figures[0]


@pytest.mark.parametrize("peak_at", [0.01, 0.4, 0.6, 0.98])
def test_no_words_of_a_picture_lie_on_others_or_are_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, peak_at: float
) -> None:
    """The peak's label and the legend; a plan of many words in the title."""
    plan = "0 to 12 of 24 blocks recomputed, offload to disk at times; 3 of 8 blocks recomputed"
    figure = drawn(monkeypatch, tmp_path, peak_at, plan)
    epochs, live, _ = figure.axes
    (label,) = live.texts
    legend = live.get_legend()
    assert legend is not None
    assert not label.get_window_extent().overlaps(legend.get_window_extent())
    assert live.get_window_extent().x0 <= label.get_window_extent().x0
    title = epochs.get_tightbbox()
    assert title is not None
    assert title.x0 >= 0
    assert title.x1 <= figure.bbox.x1


def test_a_table_of_large_figures_fits_a_usual_terminal() -> None:
    console = Console(file=io.StringIO(), width=80)
    large = {"peak_allocated_MiB": 131072.5, "peak_host_MiB": 1931072.5, "step_s": 123.456}
    plan = "0 to 48 of 48 blocks recomputed, offload to disk at times"
    print_epochs([row(1000, rank=127, plan=plan, **large)], console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in text
    assert all(word in text for word in ("1000", "131,072.5", "1,931,072.5", "123.456", "127"))


class Takes:
    """A logger's experiment that writes down what it is called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: self.calls.append((name, args, kwargs))


def pretend(kind: str, experiment: Takes) -> Any:
    """An object that is of the logger's class and has our experiment."""
    cls = getattr(images, kind)
    methods = {"experiment": property(lambda self: experiment), "run_id": "7"}
    if kind == "WandbLogger":
        methods["log_image"] = lambda self, *args: experiment.log_image(*args)
    return type(kind, (cls,), {**methods, "__init__": lambda self: None})()


@pytest.mark.parametrize(
    ("kind", "called"),
    [
        ("WandbLogger", ("log_image", ("memory", ["a.png"], 5), {})),
        ("CometLogger", ("log_image", ("a.png",), {"name": "memory", "step": 5})),
        ("MLFlowLogger", ("log_artifact", ("7", "a.png"), {})),
    ],
)
def test_loggers_that_take_images(kind: str, called: Any) -> None:
    experiment = Takes()
    assert images.send_picture(pretend(kind, experiment), "memory", Path("a.png"), 5)
    assert experiment.calls == [called]


def test_logger_that_takes_no_images(tmp_path: Path) -> None:
    assert not images.send_picture(CSVLogger(tmp_path), "memory", Path("a.png"), 5)


class OwnLogger(Logger):
    """The least that a logger must have: no `experiment`."""

    name = version = "own"

    def log_metrics(self, *_: Any, **__: Any) -> None:
        pass

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def test_logger_without_an_experiment() -> None:
    assert not images.send_picture(OwnLogger(), "memory", Path("a.png"), 5)


# --- memory that runs out, and CUDA's own record


class RunsOut(Net):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 7 GiB")
        return loss


def test_what_held_the_memory_is_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trainer(tmp_path, PeakMemoryMonitor(snapshot="oom")).fit(RunsOut())
    out = capsys.readouterr().out
    assert "Memory when it ran out (rank 0)" in out
    assert "parameters" in out
    assert "│ optimizer states      │ 0.5 │" in out


def test_other_errors_say_nothing_of_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Net()
    model.fail_at = 1
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, PeakMemoryMonitor(snapshot="oom")).fit(model)
    assert "Memory when it ran out" not in capsys.readouterr().out


def test_held_table() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_held({"parameters": 3 * 2**20, "activations and other": 2**30}, 2, console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "rank 2" in text
    assert "1,024.0" in text
    assert "1,027.0" in text


def test_snapshot_on_a_cpu_says_that_there_is_none(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match=r"snapshot=True.* does nothing on cpu"):
        assert len(fit_rows(tmp_path, Net(), PeakMemoryMonitor(snapshot=True))) == 2


class History:
    """Stands for CUDA's record."""

    calls: list[str] = []

    def __init__(self, is_on: bool = False) -> None:
        self.calls.append(f"made {is_on}")

    def start(self) -> None:
        self.calls.append("start")

    def save(self, path: Path) -> None:
        self.calls.append(path.name)

    def pause(self) -> None:
        self.calls.append("pause")

    def stop(self) -> None:
        self.calls.append("stop")


@pytest.fixture
def history(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A run that believes to be on CUDA, as far as the snapshot goes."""
    monkeypatch.setattr(one_step, "CudaHistory", History)
    monkeypatch.setattr(one_step, "_has_history", lambda device: True)
    monkeypatch.setattr(History, "calls", [])
    return History.calls


def test_snapshot_of_one_step(tmp_path: Path, history: list[str]) -> None:
    fit_rows(tmp_path, Net(), PeakMemoryMonitor(snapshot=True))
    name = "memory_snapshot_rank0.pickle"
    # The first step has no optimizer states yet: the second one's takes its place.
    assert history == ["made False", *["start", name, "pause"] * 2, "stop"]


def test_snapshot_when_memory_runs_out(tmp_path: Path, history: list[str]) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        trainer(tmp_path, PeakMemoryMonitor(snapshot="oom")).fit(RunsOut())
    assert history == ["made True", "memory_snapshot_rank0.pickle", "stop"]


# --- the words


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ({"every_n_epochs": 0}, ValueError, "every_n_epochs must be at least 1, got 0"),
        ({"every_n_epochs": 1.5}, TypeError, "every_n_epochs must be an int"),
        ({"first_steps": 0}, ValueError, "first_steps must be at least 1, got 0; None follows"),
        ({"plot": "x.png"}, TypeError, "plot must be True or False, got 'x.png'; True saves"),
        ({"breakdown": 1}, TypeError, "breakdown must be True or False, got 1"),
        ({"table": None}, TypeError, "table must be True or False, got None"),
        ({"first_steps": True}, TypeError, "first_steps must be an int"),
        ({"snapshot": "never"}, ValueError, "snapshot='never' is not known; use True"),
        ({"snapshot": 3}, TypeError, "snapshot must be True, False or 'oom'"),
    ],
)
def test_impossible_words(words: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PeakMemoryMonitor(**words)


def test_a_cpu_run_follows_sixteen_steps_by_default() -> None:
    assert PeakMemoryMonitor().settings.first_steps == 16
    assert PeakMemoryMonitor(first_steps=None).settings.first_steps is None
