"""Runs of the app, each a few small steps: what they log, show, and leave behind."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path

import pytest
from app_helpers import SMOKE, TINY, TINY_NET, TINY_TEXT, Compose, RunCommand
from rich.console import Console

PEAK = "memory/peak_allocated_MiB"
PARTS = ("parameters", "gradients", "optimizer_states", "buffers", "activations", "other")
MEMORY = {f"memory/{name}_MiB" for name in (*PARTS, "offloaded", "peak_host", "val_peak_allocated")}
COLUMNS = {"epoch", "step", "train/loss", "val/loss", "time/s_per_step", PEAK} | MEMORY
TINY_HF = [
    "model.config.num_hidden_layers=2",
    "model.config.hidden_size=16",
    "model.config.num_attention_heads=2",
]


def read_metrics(directory: Path) -> dict[str, list[float]]:
    """The values of each column of the one `metrics.csv` below `directory`."""
    (path,) = directory.rglob("metrics.csv")
    with path.open() as file:
        rows = list(csv.DictReader(file))
    return {key: [float(row[key]) for row in rows if row[key]] for key in rows[0]}


@pytest.mark.parametrize(
    "overrides",
    [
        [*TINY_NET, *TINY_TEXT],
        ["checkpoint=none", *TINY_NET, *TINY_TEXT],
        ["model=vit", "data=digits", *TINY_NET, "model.patch_size=2", "data.batch_size=4"],
        ["model=hf_causal_lm", *TINY_HF, *TINY_TEXT],
        [
            "model=hf_causal_lm",
            "model.config.model_type=llama",
            "+model.config.intermediate_size=32",
            "checkpoint=full",
            *TINY_HF,
            *TINY_TEXT,
        ],
    ],
    ids=["gpt", "gpt-none", "vit", "hf-gpt2", "hf-llama-full"],
)
def test_each_model_trains_and_logs(
    overrides: list[str], compose_app: Compose, run_dir: Path
) -> None:
    import train

    if "model=hf_causal_lm" in overrides:
        pytest.importorskip("transformers")
    loss = train.main(compose_app(*SMOKE, *overrides))
    metrics = read_metrics(run_dir)
    assert set(metrics) == COLUMNS
    assert {len(metrics[key]) for key in COLUMNS - {"epoch", "step"}} == {1}
    assert loss == pytest.approx(metrics["val/loss"][0])
    assert metrics[PEAK][0] > 0


def test_layers_say_which_blocks(compose_app: Compose, capsys: pytest.CaptureFixture[str]) -> None:
    import train

    train.main(compose_app(*TINY, "checkpoint.every_n=1", "checkpoint.layers=blocks.1"))
    assert "1 of 1" in capsys.readouterr().out


@pytest.mark.parametrize(
    "overrides", [["logger=none", "callbacks=none"], ["~logger", "~callbacks"]]
)
def test_runs_without_loggers_and_callbacks(
    overrides: list[str],
    compose_app: Compose,
    run_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import train

    monkeypatch.chdir(tmp_path)
    train.main(compose_app(*TINY, *overrides, "trainer.max_epochs=1"))
    assert not list(run_dir.rglob("metrics.csv"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_tensorboard_beside_csv(compose_app: Compose, run_dir: Path) -> None:
    pytest.importorskip("tensorboard")
    import train

    train.main(compose_app(*TINY, "logger=[csv,tensorboard]"))
    assert list((run_dir / "tensorboard").glob("events.*"))
    assert (run_dir / "csv" / "metrics.csv").is_file()


# Lightning says that the list of best checkpoints of the first run is not carried over.
@pytest.mark.filterwarnings("ignore:The dirpath has changed")
def test_resumes_with_another_plan(compose_app: Compose, run_dir: Path) -> None:
    import train

    train.main(compose_app(*TINY, "checkpoint.every_n=1"))
    saved = run_dir / "checkpoints" / "last.ckpt"
    second = run_dir / "second"
    more = [f"ckpt_path={saved}", "trainer.max_epochs=2", f"hydra.runtime.output_dir={second}"]
    train.main(compose_app(*TINY, "checkpoint=none", *more))
    assert set(read_metrics(second)["epoch"]) == {1}


def test_default_shape_peaks_fall(compose_app: Compose, run_dir: Path) -> None:
    import train

    peaks = {}
    short = ["trainer.max_epochs=1", "trainer.limit_train_batches=2", "trainer.limit_val_batches=1"]
    for choice in ("checkpoint=none", "checkpoint.every_n=4", "checkpoint.every_n=1"):
        directory = run_dir / choice.partition("=")[2]
        place = f"hydra.runtime.output_dir={directory}"
        train.main(compose_app(choice, *short, "trainer.accelerator=cpu", place))
        peaks[choice] = read_metrics(directory)[PEAK][0]
    none, some, full = peaks.values()
    assert none > some > full
    assert full < 0.45 * none


def test_table_shows_what_was_logged() -> None:
    from report import EpochTable

    table = EpochTable()
    table.log_metrics({"epoch": 0, "val/loss": 2.5}, step=1)
    table.log_metrics({"epoch": 0, "train/loss": 3.0, PEAK: 12.34, "time/s_per_step": 0.5}, step=1)
    table.log_metrics({"epoch": 1, "train/loss": 2.75}, step=3)
    out = io.StringIO()
    table.show(Console(file=out, width=100))
    words = [line.replace("│", " ").split() for line in out.getvalue().splitlines()]
    assert ["0", "3.000", "2.500", "12.3", "0.500"] in words
    assert ["1", "2.750", "-", "-", "-"] in words


def test_command_from_another_directory(run_command: RunCommand, tmp_path: Path) -> None:
    result = run_command(*TINY, "checkpoint.every_n=4", "checkpoint.offload=true")
    directory = tmp_path / "somewhere"
    assert [path.name for path in directory.iterdir()] == ["outputs"]
    (path,) = directory.rglob("metrics.csv")
    assert (path.parents[1] / ".hydra").is_dir()  # below the run's own directory
    assert set(read_metrics(directory)) == COLUMNS
    assert "1 of 3" in result.stdout  # blocks recomputed
    assert "Epoch 0/0" in result.stdout  # the progress bar
    for title in ("Train loss", "Val loss", "Peak MiB", "s/step"):
        assert title in result.stdout
    for clutter in ("Tip", "Warning", "deprecated", "num_workers", "stopped"):
        assert clutter not in result.stdout + result.stderr


def call_main(monkeypatch: pytest.MonkeyPatch, directory: Path, *arguments: str) -> None:
    """The command in this process, which spares the import of torch and Lightning."""
    import train

    quiet = ["hydra/job_logging=disabled", "hydra/hydra_logging=disabled"]
    monkeypatch.chdir(directory)
    monkeypatch.setattr(sys, "argv", ["train.py", *arguments, *quiet])
    train.main()


def test_sweep_gives_each_job_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call_main(monkeypatch, tmp_path, "-m", *TINY, "checkpoint.every_n=1,2,4")
    paths = sorted((tmp_path / "multirun").rglob("metrics.csv"))
    peaks = [read_metrics(path.parent)[PEAK][0] for path in paths]
    assert [path.parents[1].name for path in paths] == ["0", "1", "2"]
    assert peaks == sorted(set(peaks))
    assert [path.name for path in tmp_path.iterdir()] == ["multirun"]


def test_bad_value_on_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="1"):
        call_main(monkeypatch, tmp_path, *TINY, "checkpoint.every_n=0")
    message = capsys.readouterr().err
    assert "checkpoint.every_n must be at least 1, got 0" in message
    assert len(message.splitlines()) < 20
    assert not list(tmp_path.rglob("metrics.csv"))
