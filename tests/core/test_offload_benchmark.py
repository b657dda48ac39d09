"""The benchmark's rows of a device, on a pretended one."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeEvent, FakeGpu, FakeStream, on
from helpers import assert_same

from lightning_ckpt.core import offload
from lightning_ckpt.core.offload import host, pool, staged

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def at_once(stream: FakeStream, work: Callable[[], Any], after: FakeEvent | None = None) -> None:
    assert after is None or after.is_done
    work()


def test_rows_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.delitem(sys.modules, "offload", raising=False)
    import offload as benchmark  # type: ignore[import-not-found]

    model = benchmark.make_model(2, 64, 16)
    tokens = torch.zeros(1, 16, dtype=torch.long)
    plain = benchmark.ours(model, False, 0)
    *_, gradients = benchmark.measure(plain, tokens)
    monkeypatch.setattr(FakeStream, "add", at_once)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(staged, "is_of_the_host", lambda device: False)
    monkeypatch.setattr(offload, "PinnedPool", lambda size: pool.PinnedPool(size, pin=False))
    monkeypatch.setattr(pool, "_CHUNK_BYTES", 2**16)
    seen = {}
    with on(FakeGpu(lambda below: 0, torch.device("cpu"))):
        device = torch.device("cuda")
        for name, config in benchmark.configs_for(device, None):
            config = type(config)(**{**vars(config), "min_bytes": 0})
            row = benchmark.ours(model, config, 16 * 64 * 4)
            *_, own = benchmark.measure(row, tokens)
            assert_same(own, gradients)
            seen[name] = row.report()
    assert list(seen) == [f"{where}, keep_last={n}" for n in (1, 0) for where in ("host", "disk")]
    # Tensors lie on the host here: they need not go there, but to the file.
    assert [report.out_bytes > 0 for report in seen.values()] == [False, True] * 2
    assert [report.staged_asked_bytes > 0 for report in seen.values()] == [False, True] * 2
    assert host._arriving == {}
