"""What offload by plan gives back and when, and what its link is."""

from __future__ import annotations

import random
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_device import FakeGpu, on
from helpers import MlpBlock
from offload_fakes import FakeTarget, ask, is_here, tensor
from torch import Tensor, nn

from lightning_ckpt import OffloadConfig, apply_partial_checkpoint
from lightning_ckpt.core.apply import apply_plan_quietly
from lightning_ckpt.core.budget import weighing
from lightning_ckpt.core.budget.clock import Clock
from lightning_ckpt.core.budget.costs import Call, Measurement, Option
from lightning_ckpt.core.budget.inputs import InputWatch
from lightning_ckpt.core.budget.waiting import Link, Window, windows, within_room
from lightning_ckpt.core.budget.weighing import LinkProbe, weighed
from lightning_ckpt.core.estimate import measure_step
from lightning_ckpt.core.memory import peak_tracker
from lightning_ckpt.core.offload.host import HostTarget
from lightning_ckpt.core.offload.pool import PinnedPool
from lightning_ckpt.core.offload.schedule import Scheduler
from lightning_ckpt.core.plan import BlockPlan, Plan

DIM = 16
INF = float("inf")


# --- a steady schedule


def call_of(scheduler: Scheduler, *numbers: int) -> tuple[Any, list[Any]]:
    """A call that saves a tensor for each number, and ends."""
    call = scheduler.open_call()
    places = [scheduler.save(call, tensor(n)) for n in numbers]
    scheduler.close_call()
    return call, places


@pytest.mark.parametrize("delay", [0, 10**6])
def test_bytes_go_when_the_next_call_has_ended(delay: int) -> None:
    """However fast the copy is."""
    scheduler = Scheduler(FakeTarget(delay), prefetch=1, keep_last=0, is_steady=True)
    _, (first,) = call_of(scheduler, 1)
    assert is_here(first)
    call = scheduler.open_call()
    assert is_here(first)
    second = scheduler.save(call, tensor(2))
    scheduler.look()
    assert is_here(first)
    scheduler.close_call()
    assert not is_here(first)
    assert is_here(second)
    call_of(scheduler)  # moves nothing
    assert not is_here(second)


def test_bytes_return_when_the_call_before_is_touched() -> None:
    """That may have moved nothing itself."""
    scheduler = Scheduler(FakeTarget(), prefetch=1, keep_last=0, is_steady=True)
    _, (first,) = call_of(scheduler, 1)
    middle, _ = call_of(scheduler)
    last, _ = call_of(scheduler)
    scheduler.touch(last)
    assert not is_here(first)
    scheduler.touch(middle)
    assert is_here(first)
    assert ask(first) == 1


def test_all_have_left_when_backward_begins() -> None:
    target = FakeTarget(delay=10**6)
    scheduler = Scheduler(target, prefetch=0, keep_last=0, is_steady=True)
    _, (first,) = call_of(scheduler, 1)
    _, (second,) = call_of(scheduler, 2)
    assert ask(second) == 2
    assert first.slot.is_out
    assert not is_here(first)
    assert ask(first) == 1


def test_arguments_of_two_calls_in_a_row_stay() -> None:
    """From the second on; what the first had sent is not let go."""
    scheduler = Scheduler(FakeTarget(), prefetch=0, keep_last=0, is_steady=True)
    mask, places = tensor(7), []
    for number in range(3):
        call = scheduler.open_call()
        scheduler.take(mask)
        places += [scheduler.save(call, mask), scheduler.save(call, tensor(number))]
        scheduler.close_call()
    here = weakref.ref(mask.untyped_storage())
    del mask
    assert here() is not None
    assert is_here(places[0])
    assert not is_here(places[1])
    assert scheduler.counts.out_bytes == 4 * 64
    assert [ask(place) for place in reversed(places)] == [2, 7, 1, 7, 0, 7]
    assert scheduler.counts.in_bytes <= 3 * 64


def test_what_stays_is_here_wherever_backward_turns() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=0, keep_last=0, is_steady=True)
    mask, places = tensor(7), []
    for _ in range(2):
        call = scheduler.open_call()
        scheduler.take(mask)
        places.append(scheduler.save(call, mask))
        scheduler.close_call()
    del mask
    _, (other,) = call_of(scheduler, 5)
    assert [ask(places[1]), ask(other)] == [7, 5]
    assert places[0].slot.is_out
    assert is_here(places[0])


def test_arguments_of_calls_apart_do_not_stay() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=0, keep_last=0, is_steady=True)
    skipped = tensor(7)
    places = []
    for number in range(3):
        call = scheduler.open_call()
        if number != 1:
            scheduler.take(skipped)
            places.append(scheduler.save(call, skipped))
        scheduler.close_call()
    assert not any(place.slot.stays for place in places)
    assert [ask(place) for place in places] == [7, 7]


class Stack(nn.Module):
    def __init__(self, num: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MlpBlock(DIM) for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.pow(2).mean()


def batch() -> Tensor:
    return torch.randn(4, 8, DIM, generator=torch.Generator().manual_seed(1))


def test_blocks_without_offload_follow_in_such_a_plan() -> None:
    """So the first block's input returns in the backward of the second; the last says that its
    offload is wanted, though it is the last."""
    model = Stack()
    blocks = [BlockPlan(f"blocks.{i}", "", "keep" if i == 2 else "recompute") for i in range(4)]
    blocks[0], blocks[3] = (BlockPlan(f"blocks.{i}", "", "recompute", "disk") for i in (0, 3))
    config = OffloadConfig("disk", min_bytes=0, keep_last=5, prefetch=9)
    with apply_plan_quietly(model, Plan(tuple(blocks)), config) as handle:
        model(batch()).backward()
        assert handle.offloader is not None
        report = handle.offloader.report()
    assert report.out_bytes == 2 * batch().nbytes
    assert (report.num_ahead, report.num_on_demand) == (1, 1)
    assert not any(report.stayed_bytes.values())  # torch 2.8 saves an empty tensor as well


def test_an_in_place_change_is_seen_by_those_that_follow() -> None:
    class Spoiled(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            y = self.blocks[1](x)
            x.add_(1)
            return y.sum()

    blocks = BlockPlan("blocks.0", "", "recompute", "disk"), BlockPlan("blocks.1", "", "recompute")
    with apply_plan_quietly(Spoiled(), Plan(blocks), OffloadConfig("disk", min_bytes=0)):
        loss = Spoiled.forward.__get__(model := Spoiled())(batch().requires_grad_())
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        del model


# --- windows, costs, room


def test_windows_of_a_chain() -> None:
    order: list[Any] = [("outside", None), ("forward", 0), ("forward", 1), ("forward", 2)]
    order += [("outside", None), ("recompute", 2), ("recompute", 1), ("recompute", 0)]
    assert windows(order) == {0: Window(3, 6, 1), 1: Window(4, 5, 2)}
    twice = [*order, ("recompute", 0)]
    assert windows(twice) == {1: Window(4, 5, 2)}
    waves = [*order, *((kind, c if c is None else c + 3) for kind, c in order)]
    assert windows(waves) == {
        0: Window(3, 6, 1),
        1: Window(4, 5, 2),
        3: Window(11, 14, 4),
        4: Window(12, 13, 5),
    }
    assert windows([("forward", 0), ("recompute", 0)]) == {}


def test_what_a_copy_costs() -> None:
    """What the compute does not hide, and a little of what it does."""
    link = Link(100.0, 200.0, call_seconds=0.5)
    hidden = link.seconds(1000, out_window=10.0, in_window=5.0)
    assert hidden == pytest.approx(0.5 + 0.02 * 15)
    assert link.seconds(1000, 4.0, 5.0) == pytest.approx(hidden + 6)
    assert link.seconds(1000, 10.0, 2.0) == pytest.approx(hidden + 3)
    assert Link(INF, INF).seconds(10**12, 0, 0) == 0


def test_what_finds_no_room_is_not_offered() -> None:
    """First comes first, and inputs come before what is kept."""
    inputs, kept = Option(0, 0, 0, 1.0, moved=10), Option(0, 0, None, 1.0, moved=50)
    options: Any = {"keep": kept, "recompute_offloaded": inputs, "keep_offloaded": kept}
    calls = [Call(index, options) for index in range(3)]

    def offered(room: int | None, waves: int = 1) -> list[int]:
        return [len(call.options) - 1 for call in within_room(calls, waves, room)]

    assert offered(None) == offered(150) == [2, 2, 2]
    assert offered(149) == [2, 2, 1]
    assert offered(30) == [1, 1, 1]
    assert offered(29) == [1, 1, 0]
    assert offered(0) == [0, 0, 0]
    assert offered(50, waves=3) == [2, 2, 2]


# --- who holds an input


class Holding(Stack):
    """Keeps what some blocks got beyond their forward."""

    held: Any = None

    def __init__(self, until: str) -> None:
        super().__init__()
        self.until = until

    def forward(self, x: Tensor) -> Tensor:
        inputs = []
        for block in self.blocks:
            inputs.append(x)
            x = block(x)
        extra = 0
        if self.until == "backward":
            extra = inputs[1].exp().sum() * 0  # saves what it gave, not what it got
            self.held = inputs[1]
        elif self.until == "the loss":
            extra = (inputs[1] * inputs[1].detach()).sum() * 0
        return x.pow(2).mean() + extra


def measured(model: nn.Module) -> Measurement:
    clock, tracker = Clock("cpu"), peak_tracker("cpu", model)
    offload = OffloadConfig("disk", min_bytes=0)
    return measure_step(
        model, batch(), lambda m, b: m(b), tracker=tracker, clock=clock, offload=offload
    )


def offered(model: nn.Module) -> list[bool]:
    return ["recompute_offloaded" in call.options for call in measured(model).calls]


def test_what_others_hold_is_not_given_back() -> None:
    # The batch is ours, so the first block's input stays; the last block has no time to be away.
    assert offered(Stack()) == [False, True, True, False]
    assert offered(Holding("backward")) == [False, False, True, False]


@pytest.mark.parametrize("until", ["the forward", "the loss"])
def test_what_is_held_for_a_while_leaves_later(until: str) -> None:
    def leaves(model: nn.Module) -> tuple[list[str], int]:
        step = measured(model)
        assert step.calls[1].leaves is not None
        at = max(step.calls[1].leaves, step.calls[1].gone)
        return [segment.kind for segment in step.segments], at

    kinds, at = leaves(Stack())
    assert kinds[at - 1] == "forward"
    kinds, at = leaves(Holding(until))
    assert at > len(kinds) - 1 - kinds[::-1].index("forward")
    assert at <= kinds.index("recompute")
    assert (at == kinds.index("recompute")) == (until == "the loss")


def test_small_tensors_and_state_do_not_move() -> None:
    model = Stack()
    watch = InputWatch(model, torch.device("cpu"), min_bytes=64)
    watch.begin()
    weight = next(model.parameters())
    assert watch.movable(torch.ones(16)) is not None
    for other in (torch.ones(15), weight, weight.t(), weight.detach(), torch.ones(16).to_sparse()):
        assert watch.movable(other) is None
    assert watch.movable(torch.ones(16, device="meta")) is None


def test_the_measured_step_refuses_what_autograd_does() -> None:
    class Spoiled(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            y = self.blocks[1](x)
            x.add_(1)
            return y.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        offered(Spoiled())


# --- the link


def test_words() -> None:
    assert weighed(False) is None
    for word in (True, "host"):
        assert weighed(word) == OffloadConfig(scope="all")
    assert weighed("disk") == OffloadConfig("disk", scope="all")
    assert weighed(OffloadConfig("disk")) == OffloadConfig("disk")
    assert weighed({"target": "disk", "scope": "kept"}) == OffloadConfig("disk", scope="kept")


def test_the_link_to_a_disk(tmp_path: Path) -> None:
    probe = LinkProbe(OffloadConfig("disk", directory=str(tmp_path), min_bytes=5))
    assert probe.min_bytes == 5
    link = probe.link(2**20, Clock("cpu"))
    assert 1e6 < link.out_bytes_per_second < 1e12
    assert 1e6 < link.in_bytes_per_second < 1e12
    assert 0 < link.call_seconds < 1
    assert link.room_bytes is None
    assert list(tmp_path.iterdir()) == []


def test_a_trial_copy_has_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weighing, "_MOST_BYTES", 1000)
    probe = LinkProbe(OffloadConfig("disk", directory=str(tmp_path)))
    probe.link(2**40, Clock("cpu"))
    assert probe._target is not None
    assert probe._target.asked_bytes == 1000


def test_a_full_disk_has_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    probe = LinkProbe(OffloadConfig("disk", directory=str(tmp_path)))
    monkeypatch.setattr("os.pwrite", full)
    assert probe.link(1000, Clock("cpu")).room_bytes == 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is something to move")
def test_the_host_has_no_room_for_what_is_there() -> None:
    assert LinkProbe(OffloadConfig("host")).link(1000, Clock("cpu")).room_bytes == 0


def test_a_bad_directory_is_an_error_at_once() -> None:
    with pytest.raises(ValueError, match="is no directory"):
        LinkProbe(OffloadConfig("disk", directory="/no/such"))


class DeviceClock(Clock):
    """Goes by events of the pretended device."""

    def __init__(self, gpu: FakeGpu) -> None:
        super().__init__("cpu")
        self._gpu = gpu
        self.num_marks = 0

    def mark(self) -> Any:
        self.num_marks += 1
        return self._gpu.current.record_event()

    def seconds(self, begin: Any, end: Any) -> float:
        assert begin.is_done
        assert end.is_done
        return 0.5

    def synchronize(self) -> None:
        self._gpu.finish()


def test_the_link_of_a_pretended_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its copies are timed by events, which are read when they have come."""
    gpu = FakeGpu(random.Random(0).randrange)
    probe = LinkProbe(OffloadConfig("host"))
    with on(gpu):
        monkeypatch.setattr(torch, "ones", lambda *args, **kwargs: gpu.allocate(512))
        probe._target = HostTarget(PinnedPool(4096, pin=False))
        probe._room = 4096
        clock = DeviceClock(gpu)
        link = probe.link(512, clock)
    assert clock.num_marks == 4 * 3
    assert link.out_bytes_per_second > 0
    assert link.in_bytes_per_second > 0
    assert link.room_bytes == 4096
    assert gpu.wrong == []


def test_a_plan_as_data_offloads_as_it_says() -> None:
    """All that it names, the last block too."""
    model = Stack()
    blocks = [{"name": f"blocks.{i}", "action": "recompute", "offload": "disk"} for i in range(4)]
    x = torch.randn(64, 64, DIM)
    with apply_partial_checkpoint(model, plan={"blocks": blocks}) as handle:
        model(x).backward()
        assert handle.offloaded_bytes == 4 * x.nbytes
