"""What the plan's table says."""

import io

import pytest
from rich.console import Console

from lightning_ckpt.core.plan import BlockPlan, Plan, every_n_plan
from lightning_ckpt.core.report import Difference, Report
from lightning_ckpt.summary import print_plan, print_report, short_names


def printed(shown, width: int = 100) -> str:  # type: ignore[no-untyped-def]
    console = Console(file=io.StringIO(), width=width)
    (print_report if isinstance(shown, Report) else print_plan)(shown, console)
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (["layers.0", "layers.4", "layers.8"], "layers.{0,4,8}"),
        ([f"encoder.layers.{i}" for i in range(12)], "encoder.layers.{0-11}"),
        (["a.0", "a.1", "a.3", "a.4", "a.5", "b.0"], "a.{0,1,3-5}, b.0"),
        (["head"], "head"),
        (["head", "tail"], "head, tail"),
        (["0", "1", "2"], "{0-2}"),
        ([], ""),
    ],
)
def test_short_names(names: list[str], short: str) -> None:
    assert short_names(names) == short


def test_table_has_a_row_for_each_run_of_blocks() -> None:
    blocks = [(f"encoder.{i}", "EncoderLayer") for i in range(3)]
    blocks += [(f"decoder.{i}", "DecoderLayer") for i in range(3)]
    text = printed(every_n_plan(blocks, 2, "host", notes=["something [to] know"]))
    assert "3 of 6 blocks are recomputed in backward (every_n=2)" in text
    assert "EncoderLayer" in text
    assert "encoder.{0,2}" in text
    assert "2 of 3" in text
    assert "decoder.1" in text
    assert "host" in text
    assert "Note: something [to] know" in text


def test_kept_runs_say_so() -> None:
    text = printed(every_n_plan([("a.0", "A"), ("b.0", "B")], 2, None))
    assert "0 of 1" in text
    assert "on the device" in text


def test_report_without_differences_is_two_sentences() -> None:
    text = printed(Report((), {"a.0": 1, "a.1": 0}, {"loss": 1, "gradient": 7}, 2**20, 2**19), 200)
    assert "the checkpointed step is the plain step, bit by bit" in text
    assert "Compared: 1 loss, 7 gradient. Recomputed: 1 of 2 blocks, 1 times." in text
    assert "Peak of the step: 1 MiB plain, 0.5 MiB checkpointed." in text
    assert "Differs" not in text


def test_report_says_what_differs_and_where_from() -> None:
    differences = (
        Difference("gradient", "a.0.weight[x]", "off by 1", ("a.0", "a.1", "a.2")),
        Difference("loss", "loss", "off by 2", (), in_plain_too=True),
        Difference("state", "norm", "off by 3"),
    )
    text = printed(Report(differences, {"a.0": 1}, {"loss": 1}), 200)
    assert "3 values differ" in text
    assert "(1 of them between two plain steps, too)" in text
    assert "unknown plain, unknown checkpointed" in text
    assert "a.0.weight[x]" in text
    assert "a.{0-2}" in text
    assert "plain training, begins in no block" in text
    assert "no block alone" in text


def test_report_of_nothing_recomputed_says_so() -> None:
    """All blocks frozen, or under no_grad: equal, and nothing was shown."""
    assert "no block was seen to be computed again" in printed(Report((), {"a.0": 0}), 200)


def test_a_plan_without_an_interval_has_a_row_for_each_action() -> None:
    plan = Plan(
        (
            BlockPlan("a.0", "A", "recompute", "host"),
            BlockPlan("a.1", "A", "recompute_saving"),
            BlockPlan("a.2", "A", "recompute_saving_attention"),
            BlockPlan("a.3", "A", "keep"),
            BlockPlan("a.4", "A", "keep"),
        )
    )
    text = printed(plan, width=120)
    assert "3 of 5 blocks are recomputed in backward\n" in text
    assert "every_n" not in text
    rows = [[cell.strip() for cell in line.split("│")] for line in text.splitlines() if "│" in line]
    assert [row[1:-1] for row in rows] == [
        ["A", "kept", "2", "a.{3,4}", "on the device"],
        ["A", "recomputed", "1", "a.0", "host"],
        ["A", "recomputed but for attention and products", "1", "a.1", "on the device"],
        ["A", "recomputed but for attention", "1", "a.2", "on the device"],
    ]
