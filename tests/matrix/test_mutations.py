"""The matrix notices what it should: three guards broken on purpose, and the rows that go red.

`tests/mutations.py` breaks all the others, too.
"""

from __future__ import annotations

from pathlib import Path

import mutations
import pytest

pytest.importorskip("transformers", minversion="5")

# Rows without dropout and statistics, with one of them, called by keyword or by position.
ROWS = ("llama", "bert", "resnet", "nn.TransformerEncoder", "mixture of experts", "U-Net")

RED = {
    "random numbers of torch": {"bert", "nn.TransformerEncoder", "mixture of experts"},
    "buffers": {"resnet", "mixture of experts", "U-Net"},
    "keyword arguments": {"llama", "nn.TransformerEncoder"},
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    mutations.copy_repository(folder)
    return folder


@pytest.mark.parametrize("name", RED)
def test_rows_that_go_red(name: str, copy: Path) -> None:
    """Those that depend on the guard, and no others."""
    ids = [f"{mutations.MATRIX}::test_row[{row}]" for row in ROWS]
    red = mutations.red_tests(mutations.mutation(name)._replace(tests=tuple(ids)), copy)
    assert set(red) == {f"{mutations.MATRIX}::test_row[{row}]" for row in RED[name]}


@pytest.mark.parametrize("change", mutations.MUTATIONS, ids=lambda change: change.name)
def test_each_guard_stands_where_it_is_looked_for(change: mutations.Mutation) -> None:
    """Or `mutations.py` would break nothing. Its tests are there, too."""
    text = (mutations.REPOSITORY / change.file).read_text()
    assert text.count(change.old) == 1
    assert all((mutations.REPOSITORY / test).is_file() for test in change.tests)


def test_a_missing_line_is_an_error(copy: Path) -> None:
    gone = mutations.mutation("buffers")._replace(old="no such line")
    with pytest.raises(ValueError, match=r"buffers: .*state\.py has its line 0 times"):
        mutations.red_tests(gone, copy)
