"""What the plan's table says."""

import io

import pytest
from rich.console import Console

from lightning_ckpt.core.estimate import Estimate, Point
from lightning_ckpt.core.plan import BlockPlan, Plan, every_n_plan
from lightning_ckpt.core.report import Difference, Report
from lightning_ckpt.rows import estimate_rows, short_names
from lightning_ckpt.summary import print_estimate, print_measuring, print_plan, print_report


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
    assert "wait" not in text, "nothing is offloaded, so nobody need read of it"


def test_report_without_differences_is_two_sentences() -> None:
    text = printed(Report((), {"a.0": 1, "a.1": 0}, {"loss": 1, "gradient": 7}, 2**33, 2**19), 200)
    assert "the checkpointed step is the plain step, bit by bit" in text
    assert "Compared: 1 loss, 7 gradients. Recomputed: 1 of 2 blocks, 1 times." in text
    assert "Peak of the step: 8,192.00 MiB plain, 0.50 MiB checkpointed." in text
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
        ["A", "nothing", "2", "a.{3,4}", "on the device"],
        ["A", "everything", "1", "a.0", "host"],
        ["A", "all but attention", "1", "a.2", "on the device"],
        ["A", "only pointwise", "1", "a.1", "on the device"],
    ]


@pytest.mark.parametrize("width", [80, 120])
def test_a_chosen_plan_fits_a_usual_terminal(width: int) -> None:
    actions = ("keep", "recompute", "recompute_saving", "recompute_saving_attention")
    names = [f"model.layers.{index}" for index in range(8)]
    blocks = [BlockPlan(n, "LlamaDecoderLayer", actions[i % 4]) for i, n in enumerate(names)]  # type: ignore[arg-type]
    lines = printed(Plan(tuple(blocks)), width).splitlines()
    assert len(lines) == 1 + 3 + 4 + 1, "no cell is broken"
    assert "…" not in "".join(lines)


def test_a_plan_after_a_progress_bar_begins_on_its_own_line() -> None:
    plan = every_n_plan([("a.0", "A")], 1, None)
    for is_terminal in (True, False):
        console = Console(file=io.StringIO(), width=80, force_terminal=is_terminal)
        print_plan(plan, console, after_progress=True)
        assert console.file.getvalue().startswith("\n") is is_terminal  # type: ignore[attr-defined]


def test_a_measured_step_is_one_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_measuring(every_n_plan([("a.0", "A"), ("a.1", "A")], 1, None), "14GiB", console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("\n") == 1
    assert "first step recomputes all 2 blocks, to plan for 14GiB" in text


def test_without_unicode_the_table_is_of_plain_characters() -> None:
    file = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    print_plan(every_n_plan([("a.0", "A")], 1, None), Console(file=file, width=80))
    file.seek(0)
    assert "a.0" in file.read()


POINTS = [
    Point("plain", Plan((BlockPlan("a", "A", "keep"),)), 2**30, 1.0),
    *(Point(f"every_n={n}", Plan((BlockPlan("a", "A", "recompute"),)), 10, 1.5) for n in (3, 2, 1)),
]


def estimated(num_front: int) -> Estimate:
    plan = Plan((BlockPlan("a", "A", "keep"), BlockPlan("b", "A", "recompute_saving")))
    front = tuple(Point("planned", plan, 2**20 * i, 2 - i / 100) for i in range(num_front))
    fits = Point("budget=1GiB", plan, 2**29, 1.0)
    return Estimate(None, tuple(POINTS), front, (fits, Point("budget=1KiB", None, 2**20, 0.0)))  # type: ignore[arg-type]


@pytest.mark.parametrize(("num", "left_out"), [(0, 0), (12, 0), (40, 28)])
def test_an_estimate_shows_some_rows(num: int, left_out: int) -> None:
    shown, count = estimate_rows(estimated(num), all_rows=False)
    every, _ = estimate_rows(estimated(num), all_rows=True)
    assert [row[0] for row in shown[0]] == ["plain", "every_n=1 to 3"]
    assert (len(shown[1]), count) == (num - left_out, left_out)
    assert len(every[1]) == num
    assert shown[1][:1] + shown[1][-1:] == every[1][:1] + every[1][-1:]
    assert all(row in every[1] for row in shown[1])
    assert shown[2] == [
        ("budget=1GiB", "0", "1", "1", "512.0 MiB", "1.000"),
        ("budget=1KiB", "-", "-", "-", "needs 1.0 MiB", "-"),
    ]


def test_the_estimates_table_says_how_to_see_the_rest() -> None:
    console = Console(file=io.StringIO(), width=80)
    print_estimate(estimated(40), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "28 more rows with all_rows=True" in text
    assert "…" not in text
    print_estimate(estimated(40), console, all_rows=True)
    assert console.file.getvalue().count("more rows") == 1  # type: ignore[attr-defined]
