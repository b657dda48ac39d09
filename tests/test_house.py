"""Which way imports run, and that each outside name has its one place."""

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import lightning_ckpt

PACKAGE = Path(lightning_ckpt.__file__).parent
FILES = sorted(path for path in PACKAGE.rglob("*.py") if "conf" not in path.parts)
CORE = PACKAGE / "core"

# The one file, or folder, that may import each of these.
PLACES = {
    "hydra": ["config.py"],
    "omegaconf": ["config.py"],
    "rich": ["summary.py"],
    "matplotlib": ["images.py", "plot.py"],
    "transformers": [],  # found in sys.modules, never imported
}


def imports(path: Path) -> Iterator[str]:
    """Dotted names that a file imports, `from a import b` as `a.b`."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def dotted_names(path: Path) -> Iterator[str]:
    """Imports, and attributes of names (`torch._C.x`)."""
    yield from imports(path)
    for node in ast.walk(ast.parse(path.read_text())):
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if parts and isinstance(node, ast.Name):
            yield ".".join([node.id, *reversed(parts)])


def private_names(path: Path, library: str) -> list[str]:
    return [
        name
        for name in dotted_names(path)
        if name.split(".")[0] == library
        and any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
    ]


def outside_their_place(files: list[Path]) -> list[str]:
    return [
        f"{path.name} imports {name}"
        for path in files
        for name in imports(path)
        if path.name not in PLACES.get(name.split(".")[0], [path.name])
    ]


def test_each_library_has_its_place() -> None:
    assert outside_their_place(FILES) == []


def test_that_check_can_fail(tmp_path: Path) -> None:
    wrong = tmp_path / "blocks.py"
    wrong.write_text("def f():\n    from rich.table import Table\n")
    assert outside_their_place([wrong]) == ["blocks.py imports rich.table.Table"]


@pytest.mark.parametrize(
    ("library", "place"), [("torch", "_torch.py"), ("lightning", "_lightning.py")]
)
def test_private_names_have_one_place(library: str, place: str) -> None:
    found = {path.name: private_names(path, library) for path in FILES if path.name != place}
    assert {name: names for name, names in found.items() if names} == {}


def test_that_check_can_fail_too() -> None:
    assert "torch.utils._python_dispatch.TorchDispatchMode" in private_names(
        CORE / "_torch.py", "torch"
    )


@pytest.mark.parametrize(
    ("file", "strangers"),
    [
        ("core/stacks.py", ["blocks", "plan", "recompute", "apply", "swap", "offload"]),
        ("core/blocks.py", ["plan", "recompute", "apply", "swap", "offload"]),
        ("core/plan.py", ["blocks", "recompute", "apply", "swap", "offload"]),
        ("core/recompute.py", ["blocks", "plan", "apply", "swap", "offload"]),
        ("core/memory/*.py", ["blocks", "plan", "recompute", "apply", "swap", "offload", "budget"]),
        ("core/budget/*.py", ["blocks", "apply", "handle", "swap", "memory.live_bytes"]),
        ("core/out_of_memory/*.py", ["blocks", "recompute", "apply", "handle", "swap", "budget"]),
        ("core/offload/*.py", ["blocks", "apply", "handle", "swap", "budget", "out_of_memory"]),
    ],
)
def test_apply_alone_joins_the_parts(file: str, strangers: list[str]) -> None:
    names = [name for path in PACKAGE.glob(file) for name in imports(path)]
    assert names
    assert [
        name
        for name in names
        for stranger in strangers
        if f"{name}.".startswith(f"lightning_ckpt.core.{stranger}.")
    ] == []


def test_adapters_do_not_import_each_other() -> None:
    adapters = {"callbacks", "monitor", "strategies"}
    for adapter in adapters:
        others = {f"lightning_ckpt.{other}" for other in adapters - {adapter}}
        names = list(imports(PACKAGE / f"{adapter}.py"))
        assert not any(name.startswith(tuple(others)) for name in names)


LOAD_CORE_ALONE = """
import importlib, pathlib, sys, types
package = types.ModuleType("lightning_ckpt")  # without what its __init__ imports
package.__path__ = [{package!r}]
sys.modules["lightning_ckpt"] = package
for blocked in {blocked!r}:
    sys.modules[blocked] = None
for path in sorted(pathlib.Path({package!r}, "core").rglob("*.py")):
    parts = path.relative_to({package!r}).with_suffix("").parts
    importlib.import_module("lightning_ckpt." + ".".join(p for p in parts if p != "__init__"))
"""


@pytest.mark.parametrize(
    ("blocked", "loads"),
    [
        (["lightning", "pytorch_lightning", "hydra", "rich", "transformers"], True),
        (["torch"], False),
    ],
)
def test_core_needs_torch_only(blocked: list[str], loads: bool) -> None:
    """The second row shows that the first could fail."""
    script = LOAD_CORE_ALONE.format(package=str(PACKAGE), blocked=blocked)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode == 0) is loads, done.stderr


PUBLIC = {
    "Block",
    "BlockPlan",
    "Difference",
    "Handle",
    "OffloadConfig",
    "PartialCheckpoint",
    "PartialCheckpointDDPStrategy",
    "PartialCheckpointFSDPStrategy",
    "PartialCheckpointModelParallelStrategy",
    "PartialCheckpointStrategy",
    "PeakMemoryMonitor",
    "Plan",
    "Report",
    "apply_partial_checkpoint",
    "draw_estimate",
    "estimate",
    "find_blocks",
    "is_recomputing",
    "print_estimate",
    "verify",
}


def test_public_names() -> None:
    modules = {path.stem for path in PACKAGE.iterdir()}
    shown = {
        name for name in vars(lightning_ckpt) if not name.startswith("_") and name not in modules
    }
    assert shown == PUBLIC


def test_every_file_can_be_imported() -> None:
    for path in FILES:
        parts = [p for p in path.relative_to(PACKAGE).with_suffix("").parts if p != "__init__"]
        importlib.import_module(".".join(["lightning_ckpt", *parts]))
