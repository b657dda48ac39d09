"""Steps on an accelerator by made-up counters; the resident set; CUDA's own record."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pretended import Counters
from torch import nn

from lightning_ckpt.core.memory import cuda_history, resident
from lightning_ckpt.core.memory.cuda_history import CudaHistory
from lightning_ckpt.core.memory.device_steps import DeviceSteps
from lightning_ckpt.core.memory.peak import PeakUnavailable

KIB = 1024
CPU = torch.device("cpu")  # where the tensors of these tests lie


class Model(nn.Module):
    """A parameter of 4 KiB and a buffer of 1 KiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1024))
        self.register_buffer("scale", torch.ones(256))


class Run:
    """Steps of a model whose allocator says what the test wants."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.source = DeviceSteps(CPU, self.counters)
        self.model = Model()
        self.optimizer = torch.optim.Adam(self.model.parameters())

    def step(self, forward: list[int], backward: list[int], update: list[int]) -> None:
        """Live KiB in each stretch; the last of `forward` is what forward leaves."""
        source, counters = self.source, self.counters
        source.begin(self.model, [self.optimizer], None)
        counters.set(*(KIB * live for live in forward))
        self.model.zero_grad()
        source.forward_ended()
        counters.set(*(KIB * live for live in backward))
        self.model.weight.grad = torch.ones(1024)
        source.backward_ended()
        counters.set(*(KIB * live for live in update))
        self.optimizer.step()
        source.end()

    def parts(self) -> dict[str, float]:
        figures = self.source.figures
        assert sum(figures.parts.values()) == figures.peak
        return {part: num_bytes / KIB for part, num_bytes in figures.parts.items()}


def test_peak_in_backward() -> None:
    run = Run()
    run.counters.set(1000 * KIB, 5 * KIB)  # before the epoch
    run.source.reset()
    run.step([20, 15], [30, 9], [25, 17])
    assert run.source.figures.peak == 30 * KIB
    assert run.source.figures.activations == 10 * KIB
    assert run.source.figures.reserved == 60 * KIB
    # No states yet, no gradients when backward began.
    expected = {"parameters": 4, "gradients": 0, "buffers": 1, "optimizer_states": 0}
    assert run.parts() == {**expected, "activations": 10, "other": 15}


def test_peak_in_forward_has_the_old_gradients() -> None:
    run = Run()
    run.source.reset()
    run.step([20, 15], [16, 9], [19, 17])
    run.step([80, 70], [60, 20], [30, 17])
    assert run.source.figures.activations == (70 - 17 + 4) * KIB  # the old gradients went
    parts = run.parts()
    assert parts["gradients"] == 4
    assert parts["optimizer_states"] == pytest.approx(8, abs=0.01)
    assert parts["activations"] == 57
    assert parts["other"] == pytest.approx(80 - 4 - 4 - 8 - 1 - 57, abs=0.01)


def test_peak_in_the_update_has_the_new_states_and_no_activations() -> None:
    run = Run()
    run.source.reset()
    run.step([20, 15], [16, 9], [100, 17])
    parts = run.parts()
    assert parts["gradients"] == 4
    assert parts["optimizer_states"] == pytest.approx(8, abs=0.01)
    assert parts["activations"] == 0
    assert run.source.figures.activations == 15 * KIB


def test_lower_steps_change_nothing() -> None:
    run = Run()
    run.source.reset()
    run.step([20, 15], [90, 9], [19, 17])
    before = run.parts()
    run.counters.set(500 * KIB, 17 * KIB)  # validation
    run.step([80, 70], [60, 20], [30, 17])
    assert run.parts() == before
    assert run.source.figures.num_steps == 2
    assert run.source.figures.activations == 57 * KIB


def test_tensors_elsewhere_are_no_parts() -> None:
    run = Run()
    run.source = DeviceSteps(torch.device("meta"), run.counters)
    run.source.reset()
    run.step([20, 15], [90, 9], [19, 17])
    assert run.parts()["parameters"] == 0


# --- the resident set


def touched(num_mib: int) -> mmap.mmap:
    """Pages of our own: unlike the allocator's, they go back to the system when they are closed."""
    pages = mmap.mmap(-1, num_mib * 2**20)
    for start in range(0, len(pages), 4096):
        pages[start] = 1
    return pages


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_resident_peak_is_reset_and_leaves_pauses_out() -> None:
    tracker = resident.ResidentSet()
    with touched(256):
        tracker.reset_peak()
    tracker.reset_peak()
    tracker.resume()
    start = tracker.current_bytes
    with touched(64):
        pass
    grown = tracker.peak_bytes - start
    assert grown == pytest.approx(64 * 2**20, rel=0.1)
    tracker.pause()
    with touched(256):
        pass
    tracker.resume()
    assert tracker.peak_bytes - start == grown
    with touched(128):
        assert tracker.current_bytes - start == pytest.approx(128 * 2**20, rel=0.1)
    assert tracker.peak_bytes - start == pytest.approx(128 * 2**20, rel=0.1)


class FakeProcess:
    rss = 100

    def __init__(self, pid: int) -> None:
        pass

    def memory_info(self) -> Any:
        return self


def test_where_the_kernel_does_not_reset_psutil_is_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(resident, "_CLEAR", tmp_path / "absent" / "clear_refs")
    monkeypatch.setitem(sys.modules, "psutil", type("psutil", (), {"Process": FakeProcess}))
    monkeypatch.setattr(FakeProcess, "rss", 100)
    tracker = resident.ResidentSet()
    tracker.reset_peak()
    tracker.resume()
    for rss in (300, 200):
        FakeProcess.rss = rss
        tracker.look()
    FakeProcess.rss = 150
    assert tracker.peak_bytes == 300
    tracker.reset_peak()
    assert tracker.peak_bytes == 150


def test_without_psutil_there_is_no_figure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(resident, "_CLEAR", tmp_path / "absent" / "clear_refs")
    monkeypatch.setitem(sys.modules, "psutil", None)
    with pytest.raises(PeakUnavailable, match="without psutil; `pip install psutil`"):
        resident.ResidentSet()


# --- CUDA's record


def test_history_is_saved_and_ended_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(cuda_history, "record_memory_history", lambda n: calls.append("record"))
    monkeypatch.setattr(cuda_history, "save_memory_snapshot", lambda path: calls.append(path))
    monkeypatch.setattr(cuda_history, "stop_memory_history", lambda: calls.append("end"))
    history = CudaHistory()
    history.stop()
    assert calls == []  # what others record is not ended
    history.start()
    path = tmp_path / "made" / "one.pickle"
    history.save(path)
    history.stop()
    history.stop()
    assert calls == ["record", str(path), "end"]
    assert path.parent.is_dir()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_snapshot_is_what_the_viewer_reads(tmp_path: Path) -> None:
    import pickle

    history = CudaHistory(is_on=True)
    held = torch.empty(2**20, device="cuda")
    history.save(tmp_path / "one.pickle")
    history.stop()
    snapshot = pickle.loads((tmp_path / "one.pickle").read_bytes())
    assert {"segments", "device_traces"} <= set(snapshot)
    assert any(event["action"] == "alloc" for event in snapshot["device_traces"][0])
    assert held.numel()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_cuda_steps_add_up() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4))).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    source = DeviceSteps(torch.device("cuda", 0))
    source.reset()
    for _ in range(2):
        x = torch.randn(4096, 1024, device="cuda")
        source.begin(model, [optimizer], x)
        loss = model(x).relu().sum()
        optimizer.zero_grad()
        source.forward_ended()
        loss.backward()
        source.backward_ended()
        optimizer.step()
        source.end()
    figures = source.figures
    assert sum(figures.parts.values()) == figures.peak
    assert figures.parts["parameters"] == sum(p.nbytes for p in model.parameters())
    assert figures.activations >= 4 * x.nbytes
    assert figures.reserved is not None
    assert figures.reserved >= figures.peak
