"""Make `docs/models.md` from what the matrix found:

MATRIX_RESULTS=found.jsonl pytest tests/matrix && python tests/matrix/make_page.py found.jsonl
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from importlib.metadata import version
from itertools import groupby
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "models.md"

HEAD = """# Models that were tried

Each row is a model made from its real class with a tiny random configuration, trained for three
steps with AdamW on a CPU, once plain and once with every block checkpointed, from one seed. "same"
means, bit by bit: what each step returned, every gradient of every step, parameters, buffers,
attributes, optimizer state, and the state of all random generators; and that each checkpointed
block ran twice as often as in plain training (or as the remark says). "peak" is the peak of live
bytes of a step in terms of plain training, parameters and gradients counted in: at these sizes it
shows that memory falls, not how far.

`tests/matrix` holds the rows and runs them; this page is made from its results
(`tests/matrix/make_page.py`), with torch {torch} and Transformers {transformers}. The rows of
timm {timm} and torchvision {torchvision} need `pip install --no-deps timm torchvision`.

{summary}
"""


def page(entries: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """The whole page."""
    counts = Counter(entry["status"] for entry in entries)
    summary = ", ".join(f"{count} {status}" for status, count in counts.items())
    parts = [HEAD.format(**versions, summary=f"{len(entries)} rows: {summary}.")]
    for kind, group in groupby(entries, key=lambda entry: entry["kind"]):
        parts.append(f"## {kind}\n\n| model | blocks | result | peak |\n| --- | --- | --- | --- |")
        parts[-1] += "".join(f"\n{row_of(entry)}" for entry in group) + "\n"
    return "\n".join(parts)


def row_of(entry: dict[str, Any]) -> str:
    """One line of a table."""
    result = entry["status"] + (f"; {entry['note']}" if entry["note"] else "")
    peak = f"{entry['peak']:.2f}" if "peak" in entry else "-"
    return f"| {entry['name']} | {entry['blocks']} | {result} | {peak} |".replace("*", "\\*")


def read(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


if __name__ == "__main__":
    import torch
    import transformers

    found = read(Path(sys.argv[1]).read_text())
    known = {"torch": torch.__version__, "transformers": transformers.__version__}
    known |= {name: version(name) for name in ("timm", "torchvision")}
    PAGE.write_text(page(found, known))
