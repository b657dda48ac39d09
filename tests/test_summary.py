"""What the plan's table says."""

import io

import pytest
from rich.console import Console

from lightning_ckpt.core.plan import every_n_plan
from lightning_ckpt.summary import print_plan, short_names


def printed(plan, width: int = 100) -> str:  # type: ignore[no-untyped-def]
    console = Console(file=io.StringIO(), width=width)
    print_plan(plan, console)
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
