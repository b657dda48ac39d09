"""The scheduler alone, with a place that records what it is told."""

import itertools
import threading
import time
import weakref
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from offload_fakes import FakeTarget, ask, forward, is_here, restored, tensor
from torch import Tensor

from lightning_ckpt.core.offload import leaving, slots
from lightning_ckpt.core.offload.schedule import Scheduler
from lightning_ckpt.core.offload.slots import Call, Place, live
from lightning_ckpt.core.offload.storages import StorageMap


def test_a_source_is_let_go_when_its_copy_has_ended_and_not_before() -> None:
    target = FakeTarget(delay=1)
    scheduler = Scheduler(target, prefetch=1, keep_last=0)
    source = tensor(1)
    storage = weakref.ref(source.untyped_storage())
    place = scheduler.save(scheduler.open_call(), source)
    del source
    scheduler.look()
    assert storage() is not None
    scheduler.look()
    assert storage() is None
    assert ask(place) == 1


@pytest.mark.parametrize("keep_last", [0, 1, 3, 9])
def test_the_newest_calls_keep_theirs(keep_last: int) -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=0, keep_last=keep_last)
    places = forward(scheduler, list(range(6)))
    scheduler.settle()
    assert [is_here(p) for p in places.values()] == [n >= 6 - keep_last for n in range(6)]
    assert [ask(places[n]) for n in reversed(range(6))] == [5, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_the_next_calls_are_fetched_ahead(prefetch: int) -> None:
    target = FakeTarget()
    scheduler = Scheduler(target, prefetch, keep_last=0)
    places = forward(scheduler, list(range(5)))
    target.log.clear()
    for number in (4, 3):
        ask(places.pop(number))
        ahead = [n for n in places if is_here(places[n])]
        assert ahead == sorted(range(number - prefetch, number))
    assert target.log == [f"in {n}" for n in range(4, 2 - prefetch, -1)]
    assert scheduler.counts.num_ahead == (0 if prefetch == 0 else 1 + prefetch)


def test_the_order_is_learned_from_the_first_step() -> None:
    target = FakeTarget()
    scheduler = Scheduler(target, prefetch=1, keep_last=0)
    order = [2, 0, 3, 1]
    for step in range(3):
        places = forward(scheduler, list(range(4)))
        target.log.clear()
        on_demand = scheduler.counts.num_on_demand
        assert [ask(places.pop(n)) for n in order] == order
        assert scheduler.counts.num_on_demand - on_demand == (1 if step else 3)
    assert target.log == [f"in {n}" for n in order]


def test_waves_of_other_lengths_have_orders_of_their_own() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=1, keep_last=0)
    for step in range(3):
        for order in ([0, 1, 2], [3, 2, 1, 0]):
            places = forward(scheduler, list(range(len(order))))
            before = scheduler.counts.num_on_demand
            assert [ask(places.pop(n)) for n in order] == order
            assert step == 0 or scheduler.counts.num_on_demand == before + 1


def test_the_orders_that_are_remembered_have_a_bound() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=1, keep_last=0)
    for length in range(1, 40):
        places = forward(scheduler, list(range(length)))
        ask(places[0])
    assert len(scheduler._orders) == slots._MOST_ORDERS


def test_the_order_that_was_not_needed_for_longest_is_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(slots, "_MOST_ORDERS", 2)
    scheduler = Scheduler(FakeTarget(), prefetch=1, keep_last=0)
    counts = scheduler.counts

    def num_on_demand(length: int) -> int:
        """In a backward that begins with the first call, each time."""
        places, before = forward(scheduler, list(range(length))), counts.num_on_demand
        assert [ask(places.pop(n)) for n in range(length)] == list(range(length))
        return counts.num_on_demand - before

    for length, is_known in ((3, False), (4, False), (3, True), (5, False), (3, True), (4, False)):
        assert (num_on_demand(length) == 1) == is_known


def test_what_was_asked_for_is_not_expected_again() -> None:
    """Neither after the last call nor where one was asked for twice; graphs are kept."""
    scheduler = Scheduler(FakeTarget(), prefetch=1, keep_last=0)
    for step in range(3):
        places = forward(scheduler, list(range(4)))
        before = scheduler.counts.num_on_demand
        for number in (3, 2, 3, 1, 0) if step == 0 else (3, 2, 1, 0):
            assert ask(places[number]) == number
        assert not any(is_here(places[number]) for number in (3, 2, 1))
        assert step == 0 or scheduler.counts.num_on_demand == before + 1


def test_what_was_fetched_for_nothing_is_let_go() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=2, keep_last=0)
    places = forward(scheduler, list(range(9)))
    ask(places[8])
    assert [n for n in places if is_here(places[n])] == [6, 7]
    ask(places[3])
    assert [n for n in places if is_here(places[n])] == [1, 2]


def test_what_was_wanted_for_nothing_while_its_copy_was_under_way_is_let_go_at_its_end() -> None:
    scheduler = Scheduler(FakeTarget(delay=10**6), prefetch=1, keep_last=0)
    places = forward(scheduler, list(range(4)))
    ask(places[3])
    ask(places[0])
    assert [n for n in places if is_here(places[n])] == [2, 3]
    scheduler.settle()
    assert [n for n in places if is_here(places[n])] == []


def test_a_tensor_of_several_calls_leaves_once_and_stays_with_the_newest() -> None:
    target = FakeTarget()
    scheduler = Scheduler(target, prefetch=0, keep_last=1)
    shared = tensor(7)
    places = []
    for number in range(3):
        call = scheduler.open_call()
        places += [scheduler.save(call, shared[1:]), scheduler.save(call, tensor(number))]
        scheduler.close_call()
    del shared
    scheduler.settle()
    assert target.log == ["out 7", "out 0", "out 1"]
    assert [is_here(place) for place in places] == [True, False, True, False, True, True]
    assert [ask(place) for place in reversed(places)] == [2, 7, 1, 7, 0, 7]
    assert target.log[3:] == ["in 1", "in 0"]


def test_a_tensor_of_several_calls_is_let_go_when_a_call_does_without_it() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=0, keep_last=1)
    shared = tensor(7)
    places = []
    for number in range(3):
        call = scheduler.open_call()
        places.append(scheduler.save(call, shared if number < 2 else tensor(number)))
        scheduler.close_call()
        scheduler.settle()
    assert [is_here(place) for place in places] == [False, False, True]


def test_sources_are_let_go_when_a_call_begins_and_when_one_ends() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=0, keep_last=0)
    places = forward(scheduler, [0])
    assert is_here(places[0])
    scheduler.open_call()
    assert not is_here(places[0])
    place = scheduler.save(scheduler.open_call(), tensor(1))
    scheduler.close_call()
    assert not is_here(place)


def test_entries_of_storages_end_with_them() -> None:
    known: StorageMap[int] = StorageMap()
    first = tensor(1)
    known.put(first.untyped_storage(), 1)
    assert known.get(first.untyped_storage()) == 1
    assert known.get(tensor(2).untyped_storage()) is None
    del first
    assert len(known) == 0
    for _ in range(100):  # one of these has its address
        assert known.get(tensor(3).untyped_storage()) is None


def test_an_entry_is_not_ended_by_a_dead_one_with_its_key() -> None:
    known: StorageMap[int] = StorageMap()
    keys = set()
    for number in range(100):
        storage = tensor(number).untyped_storage()
        keys.add(id(storage))
        known.put(storage, number)
        assert known.get(storage) == number
        del storage
    assert len(keys) < 100, "no storage had the key of one before"
    assert len(known) == 0
    assert known._lifetimes._known == {}, "what is dead is still known"


def test_a_storage_that_an_interrupt_left_without_a_value() -> None:
    known: StorageMap[int] = StorageMap()
    storage = tensor(1).untyped_storage()
    known._lifetimes.watch(storage, id(storage))
    del storage
    assert len(known) == 0


def test_entries_that_are_put_again_and_cleared() -> None:
    known: StorageMap[int] = StorageMap()
    kept = tensor(1).untyped_storage()
    for number in range(9):
        known.put(kept, number)
    assert known.get(kept) == 8
    assert len(known._lifetimes._known) == 1
    known.clear()
    assert known.get(kept) is None
    known.put(kept, 3)
    assert known.get(kept) == 3
    del kept
    assert len(known) == 0


def test_a_tensor_of_several_calls_does_not_leave_while_one_of_them_is_among_the_newest() -> None:
    target = FakeTarget()
    scheduler = Scheduler(target, prefetch=0, keep_last=2)
    shared = tensor(7)
    places = []
    for number in range(5):
        call = scheduler.open_call()
        places += [scheduler.save(call, shared), scheduler.save(call, tensor(number))]
        scheduler.close_call()
    assert target.log == ["out 0", "out 1", "out 2"]


def test_a_tensor_of_several_calls_is_fetched_once_where_the_calls_follow_each_other() -> None:
    target = FakeTarget()
    scheduler = Scheduler(target, prefetch=1, keep_last=0)
    places = []
    shared = tensor(7)
    for number in range(4):
        call = scheduler.open_call()
        if number != 1:
            places.append(scheduler.save(call, shared))
        places.append(scheduler.save(call, tensor(number)))
    del shared
    scheduler.settle()
    assert target.log == ["out 7", "out 0", "out 1", "out 2", "out 3"]
    target.log.clear()
    assert [ask(places.pop()) for _ in range(7)] == [3, 7, 2, 7, 1, 0, 7]
    # It is not needed by call 1, but by the next one: it is still here.
    assert target.log == ["in 7", "in 3", "in 2", "in 1", "in 0"]
    assert target.num_kept == 0


def test_a_view_comes_back_with_its_geometry() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=0, keep_last=0)
    base = torch.arange(24.0)
    views = [
        base.view(4, 6).t(),
        base[3:19:4],
        base.view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        base[:4].view(1, 4, 1).expand(3, 4, 2),
        base[5],
        base.view(torch.int32)[2:],
        base.view(2, 3, 4).unfold(2, 2, 1),
    ]
    for view in views:
        back = restored(scheduler.save(scheduler.open_call(), view))
        assert torch.equal(back, view)
        assert back.stride() == view.stride()
        assert back.storage_offset() == view.storage_offset()
        assert back.untyped_storage().nbytes() == view.untyped_storage().nbytes()


def test_a_change_before_the_copy_has_ended_is_an_error() -> None:
    scheduler = Scheduler(FakeTarget(delay=9), prefetch=0, keep_last=0)
    changed, other = tensor(1), tensor(2)
    places = [scheduler.save(scheduler.open_call(), t) for t in (changed, other)]
    changed.add_(1)
    assert ask(places[1]) == 2
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ask(places[0])


def test_a_change_while_the_copy_runs_is_an_error_after_it_too() -> None:
    scheduler = Scheduler(FakeTarget(delay=9), prefetch=0, keep_last=0)
    source = tensor(1)
    place = scheduler.save(scheduler.open_call(), source)
    source.add_(1)
    scheduler.settle()
    del source
    assert place.slot.source.tensor is None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ask(place)


@pytest.mark.parametrize("delay", [0, 9])
def test_a_tensor_that_is_saved_changed_and_saved_again_has_two_values(delay: int) -> None:
    scheduler = Scheduler(FakeTarget(delay), prefetch=0, keep_last=0)
    source = tensor(1)
    first = scheduler.save(scheduler.open_call(), source)
    if delay == 0:
        scheduler.look()
    source.add_(1)
    second = scheduler.save(scheduler.open_call(), source)
    assert ask(second) == 2
    if delay == 0:
        assert ask(first) == 1
    else:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            ask(first)


def test_a_change_of_what_did_not_leave_is_an_error() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=0, keep_last=1)
    source = tensor(1)
    place = scheduler.save(scheduler.open_call(), source)
    source.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        ask(place)


def test_a_second_backward_gets_the_same() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=1, keep_last=1)
    places = forward(scheduler, list(range(4)))
    for _ in range(3):
        assert [ask(places[n]) for n in (3, 2, 1, 0)] == [3, 2, 1, 0]
        scheduler.settle()
        assert not any(is_here(places[n]) for n in (0, 1, 2))


def test_what_a_call_saves_after_another_one_began_inside_of_it_leaves_too() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=0, keep_last=1)
    outer = scheduler.open_call()
    scheduler.save(scheduler.open_call(), tensor(1))
    place = scheduler.save(outer, tensor(2))
    scheduler.settle()
    assert not is_here(place)
    assert ask(place) == 2


def test_two_forwards_before_one_backward() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=1, keep_last=1)
    first, second = forward(scheduler, [0, 1, 2]), forward(scheduler, [3, 4, 5])
    assert [ask(first.pop(n)) for n in (2, 1, 0)] == [2, 1, 0]
    third = forward(scheduler, [6, 7])
    assert [ask(third.pop(n)) for n in (7, 6)] == [7, 6]
    assert [ask(second.pop(n)) for n in (5, 4, 3)] == [5, 4, 3]


def test_threads_wait_for_each_other() -> None:
    """Backward of each device has a thread of its own."""
    inside: list[int] = []
    overlaps: list[int] = []

    class Watching(FakeTarget):
        def look(self) -> None:
            inside.append(1)
            time.sleep(0.001)
            overlaps.append(len(inside))
            inside.pop()

    scheduler = Scheduler(Watching(), prefetch=1, keep_last=0)
    places = forward(scheduler, list(range(16)))
    threads = [
        threading.Thread(target=lambda part=part: [ask(places[n]) for n in part])  # type: ignore[misc]
        for part in (range(0, 16, 2), range(1, 16, 2))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(overlaps) == {1}


def test_copies_under_way_have_a_bound() -> None:
    target = FakeTarget(delay=10**6)
    scheduler = Scheduler(target, prefetch=0, keep_last=0)
    places = forward(scheduler, list(range(7)))
    here = [n for n in places if is_here(places[n])]
    assert here == [5, 6]


def test_bytes_under_way_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaving, "_MOST_BYTES", 2 * 64)
    scheduler = Scheduler(FakeTarget(delay=10**6), prefetch=0, keep_last=0)
    call = scheduler.open_call()
    places = [scheduler.save(call, tensor(n)) for n in range(7)]
    assert [n for n, place in enumerate(places) if is_here(place)] == [4, 5, 6]
    places.append(scheduler.save(call, tensor(7, num_bytes=1024)))  # the newest may be larger
    assert [n for n, place in enumerate(places) if is_here(place)] == [5, 6, 7]
    places.append(scheduler.save(call, tensor(8)))
    assert [n for n, place in enumerate(places) if is_here(place)] == [8]


def test_time_that_the_compute_waits_for_a_copy_out_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = itertools.count()
    monkeypatch.setattr(leaving, "time", SimpleNamespace(perf_counter=lambda: float(next(now))))
    scheduler = Scheduler(FakeTarget(delay=9), prefetch=0, keep_last=0)
    places = forward(scheduler, [1, 2])
    scheduler.settle()
    assert scheduler.counts.seconds_waited == 2
    assert not any(map(is_here, places.values()))


def test_without_room_a_tensor_stays() -> None:
    target = FakeTarget(room=2)
    scheduler = Scheduler(target, prefetch=1, keep_last=0)
    places = forward(scheduler, list(range(4)))
    scheduler.settle()
    assert [is_here(place) for place in places.values()] == [False, False, True, True]
    assert scheduler.counts.no_room_bytes == 2 * 64
    assert [ask(places.pop(n)) for n in (3, 2, 1, 0)] == [3, 2, 1, 0]
    places = forward(scheduler, list(range(2)))  # there is room again
    scheduler.settle()
    assert not any(map(is_here, places.values()))


def test_what_finds_no_room_is_counted_once_for_all_that_a_call_saves_of_it() -> None:
    scheduler = Scheduler(FakeTarget(room=0), prefetch=0, keep_last=1)
    call, shared = scheduler.open_call(), tensor(1)
    places = [scheduler.save(call, part) for part in (shared, shared[1:], shared[2:])]
    scheduler.open_call()
    assert scheduler.counts.no_room_bytes == 64
    assert all(map(is_here, places))


def test_calls_whose_graphs_were_dropped_are_passed_over() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=2, keep_last=0)
    places = forward(scheduler, list(range(4)))
    del places[1]
    places |= {4: forward(scheduler, [4])[4]}
    ask(places[3])
    assert [n for n in places if is_here(places[n])] == [0, 2]


def test_forwards_beside_a_graph_that_stays_leave_nothing() -> None:
    scheduler = Scheduler(FakeTarget(), prefetch=0, keep_last=0)
    kept = forward(scheduler, [0])
    for number in range(100):
        forward(scheduler, [number])
    assert scheduler._wave.num_calls == 101
    assert len(scheduler._wave._calls) <= 3
    assert ask(kept[0]) == 0


def test_a_failed_copy_is_raised_once_and_the_tensor_stays() -> None:
    target = FakeTarget(delay=1)
    scheduler = Scheduler(target, prefetch=0, keep_last=0)
    place = scheduler.save(scheduler.open_call(), tensor(1))
    target.fails = True
    scheduler.look()
    with pytest.raises(OSError, match="no space"):
        scheduler.look()
    assert ask(place) == 1
    target.fails = False
    assert ask(scheduler.save(scheduler.open_call(), tensor(2))) == 2


def test_a_tensor_whose_copy_failed_leaves_with_the_next_call_that_saves_it() -> None:
    target = FakeTarget(delay=1)
    scheduler = Scheduler(target, prefetch=0, keep_last=0)
    shared = tensor(1)
    first = scheduler.save(scheduler.open_call(), shared)
    target.fails = True
    with pytest.raises(OSError, match="no space"):
        scheduler.settle()
    target.fails = False
    second = scheduler.save(scheduler.open_call(), shared)
    scheduler.settle()
    assert not is_here(second)
    assert [ask(second), ask(first)] == [1, 1]


def test_copies_that_fail_together_are_one_error() -> None:
    target = FakeTarget(delay=1)
    scheduler = Scheduler(target, prefetch=0, keep_last=0)
    call = scheduler.open_call()
    places = [scheduler.save(call, tensor(number)) for number in range(3)]
    target.fails = True
    with pytest.raises(OSError, match="no space"):
        scheduler.settle()
    scheduler.settle()  # no second error
    target.fails = False
    assert [ask(place) for place in places] == [0, 1, 2]


def test_forwards_without_backward_leave_nothing() -> None:
    target = FakeTarget()
    scheduler = Scheduler(target, prefetch=1, keep_last=1)
    for number in range(100):
        forward(scheduler, [number, number + 1])
    assert target.num_kept == 0
    assert scheduler._wave.live_calls() == []
    assert scheduler._wave.num_calls <= 2
    assert len(scheduler._recent) <= 1
    assert len(scheduler._slots) == 0


def test_a_graph_that_is_dropped_while_its_copy_is_under_way() -> None:
    target = FakeTarget(delay=3)
    scheduler = Scheduler(target, prefetch=0, keep_last=0)
    source = tensor(1)  # the fake holds no source; a real one does until the copy ends
    scheduler.save(scheduler.open_call(), source)
    assert target.num_kept == 0
    assert ask(scheduler.save(scheduler.open_call(), tensor(2))) == 2
    scheduler.settle()
    assert not scheduler._leaving


@dataclass
class Saved:
    place: Place
    then: Tensor
    version: int
    owner: Tensor | None  # what the model holds
    is_changed: bool = False

    def look(self) -> None:
        if self.owner is not None and self.owner._version != self.version:
            self.is_changed = True


class Machine:
    """A training that does anything, and what has to come out of it."""

    def __init__(self, target: FakeTarget, prefetch: int, keep_last: int) -> None:
        self.target = target
        self.prefetch, self.keep_last = prefetch, keep_last
        self.scheduler = Scheduler(target, prefetch, keep_last)
        self.saved: list[Saved] = []
        self.tensors: list[Tensor] = []
        self.count = 0

    def call(self, number: int, again: int) -> None:
        """A block saves `number` new tensors, and one that is there already."""
        call = self.scheduler.open_call()
        for _ in range(number):
            self.save_new(call)
        if self.tensors:
            owner = self.tensors[again % len(self.tensors)]
            self.save(call, owner[1:9].view(2, 4).t(), owner)
        self.scheduler.close_call()

    def nested(self, number: int, again: int) -> None:
        """A block calls others inside of its forward, and saves something before and after."""
        call = self.scheduler.open_call()
        self.save_new(call)
        for index in range(number % 3):
            self.call(index, again)
        self.save_new(call)
        self.scheduler.close_call()

    def fail(self) -> None:
        """An exception ends a block's forward."""
        self.save_new(self.scheduler.open_call())

    def save_new(self, call: Call) -> None:
        self.count += 1
        self.tensors.append(tensor(self.count))
        self.save(call, self.tensors[-1], self.tensors[-1])

    def save(self, call: Call, value: Tensor, owner: Tensor) -> None:
        place = self.scheduler.save(call, value)
        self.saved.append(Saved(place, value.clone(), value._version, owner))

    def ask(self, index: int, keep: bool) -> None:
        if not self.saved:
            return
        index %= len(self.saved)
        saved = self.saved[index]
        saved.look()
        try:
            assert torch.equal(restored(saved.place), saved.then)
        except RuntimeError:
            assert saved.is_changed, "an error, and nothing was changed"
        if not keep:
            del self.saved[index]

    def backward(self, number: int) -> None:
        for _ in range(min(number, len(self.saved))):
            self.ask(-1, keep=False)

    def drop(self, index: int) -> None:
        if self.saved:
            del self.saved[index % len(self.saved)]

    def forget(self, index: int) -> None:
        """The model lets go of a tensor; autograd may still need it."""
        if self.tensors:
            gone = self.tensors.pop(index % len(self.tensors))
            for saved in self.saved:
                saved.look()
                if saved.owner is gone:
                    saved.owner = None

    def change(self, index: int) -> None:
        if self.tensors:
            self.tensors[index % len(self.tensors)].add_(1000)

    def check(self) -> None:
        """Nothing is here that need not be."""
        self.scheduler.settle()
        recent = [ref() for ref in self.scheduler._recent]
        current = self.scheduler._current and self.scheduler._current()
        window = {slot for ref in self.scheduler._window if (slot := ref()) is not None}
        assert len(recent) <= self.keep_last
        for place in (saved.place for saved in self.saved):
            slot = place.slot
            is_newest = slot.last_call is not None and slot.last_call() in recent
            is_refused = slot.parcel is None  # no room
            is_shared = slot in live(self.scheduler._shared)  # until a call ends without an error
            assert not is_here(place) or is_newest or slot in window or is_refused or is_shared
        if current is not None:
            calls = [current, *current.wave.after(current, self.prefetch)]
            assert window <= {slot for call in calls for slot in call.live_slots()}

    def end(self) -> None:
        self.saved.clear()
        self.tensors.clear()
        self.scheduler.settle()
        assert self.target.num_kept == 0
        assert len(self.scheduler._slots) == 0


number = st.integers(0, 30)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("call"), st.integers(0, 3), number),
        st.tuples(st.just("ask"), number, st.booleans()),
        st.tuples(st.just("backward"), st.integers(1, 12)),
        st.tuples(st.just("drop"), number),
        st.tuples(st.just("forget"), number),
        st.tuples(st.just("change"), number),
        st.tuples(st.just("nested"), number, number),
        st.tuples(st.just("fail")),
        st.tuples(st.just("check")),
    ),
    max_size=40,
)


@settings(max_examples=300, deadline=None)
@given(steps, st.integers(0, 3), st.integers(0, 2), st.integers(0, 2), st.sampled_from([None, 3]))
def test_any_training(
    steps: list[Any], delay: int, prefetch: int, keep_last: int, room: int | None
) -> None:
    machine = Machine(FakeTarget(delay, room), prefetch, keep_last)
    for name, *arguments in steps:
        getattr(machine, name)(*arguments)
    machine.check()
    machine.end()
