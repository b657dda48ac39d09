"""A budget that may offload: less than every block recomputed needs, and the same training."""

from __future__ import annotations

import io
import re
from contextlib import redirect_stdout
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import assert_same, seed_all
from lightning.pytorch.callbacks import Callback
from test_budget_in_fit import Lit, Peaks, loader, state_of, trainer_of
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_ckpt import (
    OffloadConfig,
    PartialCheckpoint,
    PartialCheckpointDDPStrategy,
    PartialCheckpointStrategy,
    fitting,
)
from lightning_ckpt.core.offload import watch_first_step

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no"),
    pytest.mark.filterwarnings("ignore:.*is deprecated"),
]

ROWS = 4096  # a block's input has 256 KiB, as many as are offloaded by default
DISK = OffloadConfig("disk", scope="all", min_bytes=0)


class Wide(Lit):
    """Six blocks, whose inputs are larger than their gradients."""

    def __init__(self) -> None:
        super().__init__(num_blocks=6)


class Plans(Callback):
    """The plan in force at the end, and what was moved."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    def on_train_end(self, trainer: Any, module: Any) -> None:
        handle = self.owner.fit_plan.handle
        self.plan, self.moved = handle.plan, handle.offloaded_bytes


def train(owner: Any = None, **kwargs: Any) -> tuple[Wide, Peaks, Plans]:
    seed_all(0)
    model, peaks, plans = Wide(), Peaks(), Plans(owner)
    callbacks: list[Any] = [peaks]
    if owner is not None:
        callbacks.append(plans)
    if isinstance(owner, PartialCheckpoint):
        callbacks.append(owner)
    elif owner is not None:
        kwargs["strategy"] = owner
    trainer_of(*callbacks, **kwargs).fit(model, loader(rows=ROWS))
    return model, peaks, plans


def least_of(text: str) -> tuple[int, float]:
    """The least without offload, and in MiB with it."""
    (least,), (with_offload,) = (
        re.findall(r"\((\d+) bytes\)", text),
        re.findall(r"with offload= beside it ([0-9.]+) MiB", text),
    )
    return int(least), float(with_offload)


@pytest.fixture(scope="module")
def error() -> str:
    with pytest.raises(ValueError, match="less than any plan needs") as caught:
        train(PartialCheckpoint(budget="9KiB", offload=False))
    return str(caught.value)


@pytest.mark.parametrize("owner", [PartialCheckpoint, PartialCheckpointStrategy])
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_budget_below_what_recompute_needs(owner: Any, share: float, error: str) -> None:
    """Held from the second step on, with the weights of plain training, bit for bit."""
    without, _ = least_of(error)
    with pytest.raises(ValueError, match="less than any plan needs") as caught:
        train(owner(budget="9KiB", offload=DISK))
    assert "offload=" not in str(caught.value)
    least = int(re.findall(r"\((\d+) bytes\)", str(caught.value))[0])
    assert least < without
    budget = int(least + share * (without - least))
    model, peaks, plans = train(owner(budget=budget, offload=DISK))
    plain, _, _ = train()
    assert_same(state_of(model), state_of(plain))
    assert plans.plan.offload == "disk"
    assert plans.moved > 0
    assert max(peaks.peaks[1:]) <= budget
    predicted = float(re.findall(r"peak at ([0-9.]+) MiB", plans.plan.notes[0])[0]) * 2**20
    assert predicted <= 1.03 * max(peaks.peaks[1:])


@pytest.mark.parametrize("owner", [PartialCheckpoint, PartialCheckpointStrategy])
def test_what_is_reported_is_the_first_step_that_offloads(owner: Any, error: str) -> None:
    """Not the measured one before it, in which nothing is moved."""
    without, _ = least_of(error)
    said = io.StringIO()
    with redirect_stdout(said):
        train(owner(budget=without - 1, offload=DISK))
    before, *reports = " ".join(said.getvalue().split()).split("Offload, first step:")
    assert "are recomputed in backward" in before
    assert len(reports) == 1
    assert "MiB moved to disk" in reports[0]
    assert "nothing was moved" not in reports[0]


def test_no_step_is_watched_where_nothing_is_offloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would make each step slower."""
    watched: list[Any] = []
    monkeypatch.setattr(
        fitting, "watch_first_step", lambda *args: watched.append(args) or watch_first_step(*args)
    )
    _, _, plans = train(PartialCheckpoint(budget="1GiB", offload=DISK))
    assert plans.plan.offload is None
    assert not watched


def test_a_later_batch_that_is_measured_is_not_reported(error: str) -> None:
    """It moves nothing, though the plan before it offloads."""
    without, _ = least_of(error)
    batches = DataLoader([torch.randn(rows, 16) for rows in (ROWS, 2 * ROWS)], batch_size=None)
    seed_all(0)
    said = io.StringIO()
    with redirect_stdout(said), pytest.raises(ValueError, match="less than any plan needs"):
        trainer_of(PartialCheckpoint(budget=without - 1, offload=DISK)).fit(Wide(), batches)
    assert "disk" in said.getvalue(), "the plan of the first"
    assert "nothing was moved" not in " ".join(said.getvalue().split())


def test_the_scope_says_what_may_be_offloaded(error: str) -> None:
    without, _ = least_of(error)
    inputs, kept = (OffloadConfig("disk", scope=scope, min_bytes=0) for scope in ("inputs", "kept"))  # type: ignore[arg-type]
    _, _, plans = train(PartialCheckpoint(budget=without - 1, offload=inputs))
    assert {block.action for block in plans.plan if block.offload} == {"recompute"}
    with pytest.raises(ValueError, match="with scope='all' in its OffloadConfig"):
        train(PartialCheckpoint(budget=without - 1, offload=kept))


def test_what_is_below_min_bytes_is_not_counted_on(error: str) -> None:
    """A word has the limit of `OffloadConfig`, which all inputs reach here."""
    without, _ = least_of(error)
    for offload, is_less in (("disk", True), (OffloadConfig("disk", min_bytes=2**19), False)):
        with pytest.raises(ValueError, match="less than any plan needs") as caught:
            train(PartialCheckpoint(budget="9KiB", offload=offload))  # type: ignore[arg-type]
        least = int(re.findall(r"\((\d+) bytes\)", str(caught.value))[0])
        assert (least < without) == is_less
        assert "offload=" not in str(caught.value)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is something to move")
def test_on_a_cpu_the_host_has_nothing_to_move() -> None:
    said = io.StringIO()
    with redirect_stdout(said):
        _, peaks, plans = train(PartialCheckpoint(budget="8MiB", offload=True))
    assert "there is nothing to move" in " ".join(said.getvalue().split())
    assert plans.plan.offload is None
    assert max(peaks.peaks) <= 2**23


def test_a_bad_directory_is_an_error_before_the_first_step() -> None:
    config = OffloadConfig("disk", scope="all", directory="/no/such")
    peaks = Peaks()
    with pytest.raises(ValueError, match="is no directory"):
        trainer_of(PartialCheckpoint(budget="1MiB", offload=config), peaks).fit(Wide(), loader())
    assert peaks.counts == []


class UnevenWide(Wide):
    """Rank 1 has twice as many rows as rank 0."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch if dist.get_rank() else batch[: len(batch) // 2], 0)


def two_ranks() -> None:
    """Run by each rank of a pair: all get one plan, with offload, which fits the larger."""
    seed_all(0)
    peaks, budget = Peaks(), 3_700_000
    strategy = PartialCheckpointDDPStrategy(
        budget=budget, offload=DISK, gradient_as_bucket_view=True
    )
    plans = Plans(strategy)
    kwargs: dict[str, Any] = {"strategy": strategy, "devices": 2, "use_distributed_sampler": False}
    trainer_of(peaks, plans, **kwargs).fit(UnevenWide(), loader(rows=ROWS))
    found: list[Any] = [None, None]
    dist.all_gather_object(found, (plans.plan.to_dict()["blocks"], max(peaks.peaks[1:])))
    (blocks, peak), (other_blocks, other_peak) = found
    assert blocks == other_blocks
    assert any(block["offload"] for block in blocks)
    assert peak < other_peak <= budget
