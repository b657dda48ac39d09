"""When each tensor leaves and comes back. No device is named in here.

Words: a *call* is one call of a block; a *slot* is a storage that was saved in it, or in several;
a *wave* is the calls between two backward passes.

Note: [What is held]
What autograd holds (a `Place`) holds its slot and its call, and the slot alone holds the copy at
the target. A graph that is dropped, used in part or kept takes its slots along, whatever happens in
between, and nothing has to be cleared at the end of a step. All else in here refers weakly.

Note: [Order]
Backward is expected to ask for the calls of a wave in the order that the last wave of as many calls
showed, and before there was one, last call first. At the first request of a call, those of the next
`prefetch` calls are fetched. A request that comes unexpected is served at once, and moves the
window; what was fetched for nothing is let go.

Note: [Steady]
Who foretells memory must know when bytes are gone. So a steady scheduler lets a source go when the
next call has ended, and at the latest when backward begins, and at no other time; the calls of
blocks that move nothing are opened as well, and tell of their backward by `touch`. What two calls
in a row get as an argument (a mask, what an encoder gave) is held by more than blocks and would be
there twice when it is back, so it stays.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from lightning_ckpt.core._torch import tensor_version
from lightning_ckpt.core.offload.leaving import Counts, Leaving
from lightning_ckpt.core.offload.slots import Call, Orders, Place, Slot, Wave, live
from lightning_ckpt.core.offload.storages import StorageMap
from lightning_ckpt.core.offload.targets import Source, Target


class Scheduler:
    """Sends slots out and brings them back.

    Args:
        target: where to.
        prefetch: so many calls ahead of backward their slots are brought back.
        keep_last: so many of the newest calls have slots that did not leave yet.
        is_steady: see the note.
    """

    def __init__(
        self, target: Target, prefetch: int, keep_last: int, is_steady: bool = False
    ) -> None:
        self.counts = Counts()
        self.on_phase: Callable[[str], None] | None = None  # told what runs next
        self._target = target
        self._prefetch = prefetch
        self._keep_last = keep_last
        self._is_steady = is_steady
        self._wave = Wave()
        self._orders = Orders()
        self._recent: list[weakref.ref[Call]] = []
        self._leaving = Leaving(self.counts)
        self._num_opened = 0
        self._shared: list[weakref.ref[Slot]] = []  # that stay for a newer call
        self._current: weakref.ref[Call] | None = None
        self._window: list[weakref.ref[Slot]] = []
        self._slots: StorageMap[weakref.ref[Slot]] = StorageMap()
        self._arguments: StorageMap[int] = StorageMap()  # numbers of calls; -1: of several
        self._lock = threading.RLock()  # backward runs in threads of its own
        self._process = os.getpid()

    @property
    def lock(self) -> AbstractContextManager[Any]:
        """Held by whoever uses this. Nobody would let go of it after a fork: Note: [Forks]."""
        if self._process != os.getpid():
            self._leaving.forget()
            self._slots.clear()
            self._wave = Wave()
            self._lock = threading.RLock()
            self._process = os.getpid()
        return self._lock

    def open_call(self) -> Call:
        """A block is called. What is no longer among the newest leaves.

        Raises:
            OSError: a copy failed.
        """
        with self.lock:
            self.look()
            if self._wave.is_over():
                self._wave = Wave()
            call = Call(self, self._wave, self._wave.num_calls)
            self._wave.add(call)
            self._num_opened += 1
            self._recent = [r for r in self._recent if r() is not None] + [weakref.ref(call)]
            while len(self._recent) > self._keep_last:
                self._depart(self._recent.pop(0)())
            self._begin(f"the forward of block {call.position + 1} that is offloaded")
            return call

    def take(self, tensor: Tensor) -> None:
        """The newest call got `tensor` as an argument: Note: [Steady]."""
        with self.lock:
            storage = tensor.untyped_storage()
            before = self._arguments.get(storage)
            if before not in (-1, self._num_opened - 1):
                self._arguments.put(storage, self._num_opened)
                return
            self._arguments.put(storage, -1)
            known = self._slots.get(storage)
            if known is not None and (slot := known()) is not None:
                slot.stays = True

    def save(self, call: Call, tensor: Tensor) -> Place:
        """`tensor` was saved for backward in `call`.

        Raises:
            OSError: a copy failed.
        """
        with self.lock:
            slot = self._slot_of(tensor)
            is_shared = slot.last_call is not None and slot.last_call() is not call
            call.add(slot)
            slot.stays = slot.stays or self._arguments.get(tensor.untyped_storage()) == -1
            is_newest = any(reference() is call for reference in self._recent)
            # Not the newest: another call began inside of this one, or none is kept back.
            if not is_newest and slot.parcel is None and not slot.stays:
                self._send(slot)
            elif is_newest and is_shared:  # under way, perhaps, for an older call
                slot.is_wanted = True
                self._shared.append(weakref.ref(slot))
            offset = int(tensor.storage_offset())
            return Place(slot, call, tensor.dtype, tensor.size(), tensor.stride(), offset)

    def close_call(self) -> None:
        """A call has ended. What it did not save again need not stay for it.

        Raises:
            OSError: a copy failed.
        """
        with self.lock:
            recent = [reference() for reference in self._recent]
            for slot in live(self._shared):
                if slot.last_call is None or slot.last_call() not in recent:
                    slot.rest()
            self._shared = [weakref.ref(slot) for slot in live(self._shared) if slot.is_wanted]
            self.look()
            if self._is_steady:
                self._leaving.end_before(self._num_opened)
            self._begin("the rest of the forward and the loss")

    def use(self, place: Place) -> torch.UntypedStorage:
        """Backward asks for what was saved.

        Raises:
            RuntimeError: it was changed in place since.
            OSError: a copy failed.
        """
        with self.lock:
            self.look()
            slot = place.slot
            self._move_to(place.call)
            storage = self._storage_of(slot)
            slot.num_pending -= 1
            if slot.num_pending <= 0:
                slot.rest()
            return storage

    def touch(self, call: Call) -> None:
        """The backward of the call is there, though it may have moved nothing.

        Raises:
            OSError: a copy failed.
        """
        with self.lock:
            self._move_to(call)

    def look(self) -> None:
        """Let go of the sources whose copies have ended.

        Raises:
            OSError: a copy failed.
        """
        with self.lock:
            if not self._is_steady:
                self._leaving.look()
            self._target.look()

    def settle(self) -> None:
        """Wait for all copies out.

        Raises:
            OSError: a copy failed.
        """
        with self.lock:
            self._leaving.settle()
            self._target.settle()

    def away_bytes(self) -> int:
        """How much of this wave is at the target only."""
        with self.lock:
            slots = {s: None for call in self._wave.live_calls() for s in call.live_slots()}
            return sum(slot.source.num_bytes for slot in slots if slot.is_away())

    def _begin(self, phase: str) -> None:
        if self.on_phase is not None:
            self.on_phase(phase)

    # --- out

    def _slot_of(self, tensor: Tensor) -> Slot:
        storage = tensor.untyped_storage()
        known = self._slots.get(storage)
        slot = known() if known is not None else None
        if slot is None or slot.source.version != tensor_version(tensor):
            slot = Slot(Source(tensor.detach()))
            self._slots.put(storage, weakref.ref(slot))
        return slot

    def _depart(self, call: Call | None) -> None:
        for slot in call.live_slots() if call is not None else ():
            # What a newer call saved as well stays with that one.
            is_newest = slot.last_call is not None and slot.last_call() is call
            if slot.parcel is None and is_newest:
                self._send(slot)

    def _send(self, slot: Slot) -> None:
        slot.parcel = self._target.send(slot.source)
        if slot.parcel is None:
            self.counts.no_room_bytes += slot.source.num_bytes
            return
        self.counts.out_bytes += slot.source.num_bytes
        self._leaving.add(slot, self._num_opened)

    # --- in

    def _move_to(self, call: Call) -> None:
        """Bring back what `call` needs, and what the calls that should follow it will need."""
        if self._current is not None and self._current() is call:
            return
        self._current = weakref.ref(call)
        wave = call.wave
        if wave.expected is None:
            self._orders.expect(wave)
            if self._is_steady:
                self._leaving.settle()
        if not call.is_asked_for:
            call.is_asked_for = True
            wave.order.append(call.position)
        own = call.live_slots()
        ahead = [slot for c in wave.after(call, self._prefetch) for slot in c.live_slots()]
        window = dict.fromkeys([*own, *ahead])
        for slot in live(self._window):
            if slot not in window:
                slot.rest()
        self._window = [weakref.ref(slot) for slot in window]
        for slot in window:
            slot.is_wanted = True
            self._bring(slot, ahead=slot not in own)
        self._begin(f"the backward of block {call.position + 1} of {wave.num_calls} offloaded ones")

    def _bring(self, slot: Slot, ahead: bool) -> None:
        """Start to bring its bytes back, if they are not here."""
        if not slot.is_away():
            return
        assert slot.parcel is not None
        slot.arrival = slot.parcel.fetch()
        self.counts.count_fetch(slot.source.num_bytes, ahead)

    def _storage_of(self, slot: Slot) -> torch.UntypedStorage:
        slot.source.check()
        if slot.source.is_changed:
            raise RuntimeError(
                f"a tensor that waits for backward, on a storage of {slot.source.num_bytes} bytes, "
                "has been modified by an inplace operation after it was saved; clone it before"
            )
        if slot.source.tensor is not None:
            return slot.source.tensor.untyped_storage()
        self._bring(slot, ahead=False)
        if slot.arrival is not None:
            start = time.perf_counter()
            slot.held = slot.arrival.wait()
            self.counts.seconds_waited += time.perf_counter() - start
            slot.arrival = None
        assert slot.held is not None
        return slot.held
