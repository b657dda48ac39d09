"""What happens to each tensor that a block saves for backward."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_ckpt.core._torch import tensor_version, view_base
from lightning_ckpt.core.offload.config import OffloadConfig
from lightning_ckpt.core.offload.leaving import Counts
from lightning_ckpt.core.offload.peaks import PeakWatch
from lightning_ckpt.core.offload.report import OffloadReport
from lightning_ckpt.core.offload.schedule import Scheduler
from lightning_ckpt.core.offload.slots import Call, Place, Slot
from lightning_ckpt.core.offload.storages import StorageMap
from lightning_ckpt.core.offload.targets import Moved, Target


class _Stayed(NamedTuple):
    """A tensor that was not moved, and its version then: under saved-tensor hooks autograd no
    longer looks for in-place changes. Its call, if that is to hear when backward asks for it."""

    tensor: Tensor
    version: int
    call: Call | None = None


class Offloader:
    """One handle's offload.

    Args:
        config: the user's words.
        target: where to.
        root: the module that the handle is for, whose parameters and buffers are not moved.
        is_steady: whether bytes come and go at times that can be foretold (see the schedule): then
            `keep_last` means nothing, and no more than one call is fetched ahead.
    """

    def __init__(
        self, config: OffloadConfig, target: Target, root: nn.Module, is_steady: bool = False
    ) -> None:
        self.config = config
        self._target = target
        self._root = weakref.ref(root)
        self.is_steady = is_steady
        prefetch, keep_last = config.prefetch, config.keep_last
        if is_steady:
            prefetch, keep_last = min(prefetch, 1), 0
        self._scheduler = Scheduler(target, prefetch, keep_last, is_steady)
        self._state: StorageMap[str] = StorageMap()  # "a parameter" or "a buffer"
        self._stayed: Counter[str] = Counter()
        self._counted: StorageMap[bool] = StorageMap()
        self._watch: PeakWatch | None = None

    def watch_peak(self, peak_bytes: Callable[[], int] | None) -> None:
        """Note from now on in which part of a step the memory is highest; None: no longer. The
        report then says so.

        Args:
            peak_bytes: gives the highest number of bytes so far.
        """
        if peak_bytes is not None:
            self._watch = PeakWatch(peak_bytes, self._scheduler.away_bytes)
            self._scheduler.on_phase = self._watch.begin
        elif self._watch is not None:
            self._watch.look()
            self._scheduler.on_phase = None

    @contextmanager
    def saving(
        self, block: nn.Module, arguments: Sequence[Tensor], is_recomputed: bool, moves: bool
    ) -> Iterator[None]:
        """Around a call of `block`: move what is saved for backward, or only follow it.

        Raises:
            OSError: a copy failed.
        """
        call = self._scheduler.open_call()
        if call.position == 0:
            self._begin_wave()
        if moves:
            self._note_state(block)  # as it is: sharding strategies exchange it around each call
        if self.is_steady:
            for tensor in arguments:
                if _storage(tensor) is not None:
                    self._scheduler.take(tensor)
        pack = _Pack(self, call, is_recomputed, moves)
        del call
        try:
            with saved_tensors_hooks(pack, _unpack):
                yield
        finally:
            pack.close()
        self._scheduler.close_call()

    def settle(self) -> None:
        """Wait until all that is to leave has left (copies run behind the compute).

        Raises:
            OSError: a copy failed.
        """
        self._scheduler.settle()

    def look(self) -> None:
        """Let go of memory of the device that nobody needs any more."""
        with self._scheduler.lock:
            self._target.look()

    @property
    def out_bytes(self) -> int:
        """Bytes copied to the target so far: no more than a look, unlike `report`, which may ask
        the device."""
        return self._scheduler.counts.out_bytes

    def report(self) -> OffloadReport:
        """What was done so far."""
        with self._scheduler.lock:
            return self._report(self._scheduler.counts, *self._target.moved())

    def _report(self, counts: Counts, out_link: Moved, in_link: Moved) -> OffloadReport:
        stayed, staged = dict(self._stayed), self._target.staged_bytes()
        if counts.no_room_bytes:
            stayed["no room at the target"] = counts.no_room_bytes
        return OffloadReport(
            target=self.config.target,
            out_bytes=counts.out_bytes,
            in_bytes=counts.in_bytes,
            stayed_bytes=stayed,
            asked_bytes=self._target.asked_bytes,
            taken_bytes=self._target.taken_bytes,
            staged_asked_bytes=staged[0],
            staged_taken_bytes=staged[1],
            num_ahead=counts.num_ahead,
            num_on_demand=counts.num_on_demand,
            seconds_waited=counts.seconds_waited + self._target.seconds_waited(),
            peak=self._watch.moment if self._watch is not None else None,
            out_link=out_link,
            in_link=in_link,
        )

    def _begin_wave(self) -> None:
        self._state.clear()
        self._counted.clear()
        root = self._root()
        if root is not None:
            self._note_state(root)

    def _note_state(self, module: nn.Module) -> None:
        for kind, tensors in (("a parameter", module.parameters()), ("a buffer", module.buffers())):
            for tensor in tensors:
                storage = _storage(tensor)
                if storage is not None:
                    self._state.put(storage, kind)

    def reason_to_stay(self, tensor: Tensor) -> str | None:
        storage = _storage(tensor)
        if storage is None:
            return "no plain tensor"
        if tensor.device.type == "cpu" and self.config.target == "host":
            return "on the host already"
        if storage.nbytes() < max(self.config.min_bytes, 1):
            return "below min_bytes"
        if isinstance(view_base(tensor), nn.Parameter):
            return "a parameter"
        return self._state.get(storage)

    def count_stayed(self, reason: str, tensor: Tensor) -> None:
        """Count a storage once in each wave; what has none each time that it is saved."""
        storage = _storage(tensor)
        if storage is None:
            self._stayed[reason] += tensor.numel() * tensor.element_size()
        elif not self._counted.get(storage):
            self._counted.put(storage, True)
            self._stayed[reason] += storage.nbytes()


class _Pack:
    """The hook that saves tensors in one call of a block. Autograd may keep it as long as the graph
    (torch 2.13 does), so it is emptied when the call ends.

    A block that is computed again may change its own inputs in place, in both of its forwards. So
    these are looked at when the first has ended, even if their copies have long left: plain
    training would not accept that either, and a second block that saved them would get them
    changed.
    """

    def __init__(self, offloader: Offloader, call: Call, is_recomputed: bool, moves: bool) -> None:
        self._state: tuple[Offloader, Call] | None = offloader, call
        self._is_recomputed = is_recomputed
        self._moves = moves
        self._seen: list[tuple[Tensor, Slot]] = []

    @torch.compiler.disable  # parts of a block may be compiled, and the compiler follows hooks
    def __call__(self, tensor: Tensor) -> _Stayed | Place:
        assert self._state is not None
        offloader, call = self._state
        reason = offloader.reason_to_stay(tensor) if self._moves else "as the plan says"
        # Without the graph: an output that its own node held would never be freed.
        tensor = tensor if tensor.grad_fn is None else tensor.detach()
        if reason is not None:
            if self._moves:
                offloader.count_stayed(reason, tensor)
            return _Stayed(tensor, tensor_version(tensor), call if offloader.is_steady else None)
        place = call.scheduler.save(call, tensor)
        if self._is_recomputed:
            self._seen.append((tensor, place.slot))
        else:
            call.scheduler.look()  # a kept block saves much: do not wait for its end
        return place

    def close(self) -> None:
        for tensor, slot in self._seen:
            if tensor_version(tensor) != slot.source.version:
                slot.source.is_changed = True
        self._seen.clear()
        self._state = None


def _storage(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain tensor: dense, with all its bytes in one storage and no pending
    conjugation or negation. A subclass may mean anything by its bytes."""
    if type(tensor) not in (Tensor, nn.Parameter) or tensor.is_meta:
        return None
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    if tensor.is_conj() or tensor.is_neg():
        return None
    try:
        return tensor.untyped_storage()
    except (RuntimeError, NotImplementedError):  # a wrapper of `torch.func`
        return None


@torch.compiler.disable
def _unpack(packed: _Stayed | Place) -> Tensor:
    if isinstance(packed, Place):
        storage = packed.call.scheduler.use(packed)
        empty = torch.empty(0, dtype=packed.dtype, device=storage.device)
        return empty.set_(storage, packed.offset, packed.size, packed.stride)
    if packed.call is not None:
        packed.call.scheduler.touch(packed.call)
    if tensor_version(packed.tensor) != packed.version:
        raise RuntimeError(
            "a tensor that was saved for backward in an offloaded block was modified by an inplace "
            f"operation after that (shape {tuple(packed.tensor.shape)}, version "
            f"{tensor_version(packed.tensor)}, expected {packed.version}); clone it before"
        )
    return packed.tensor


# Which offload is in force for each block, and whether it moves anything of that block. Kept here,
# not on the modules, so that copies know nothing of it.
_in_force: WeakKeyDictionary[nn.Module, tuple[Offloader, bool]] = WeakKeyDictionary()


def put_in_force(block: nn.Module, offloader: Offloader | None, moves: bool = True) -> None:
    """Let `block` offload by `offloader` from now on, or not at all.

    Args:
        block: the block.
        offloader: follows its calls.
        moves: whether it moves what they save.
    """
    if offloader is None:
        former = _in_force.pop(block, None)
        if former is not None:
            former[0].look()
    else:
        _in_force[block] = offloader, moves


def saving(
    block: nn.Module, arguments: Sequence[Tensor], is_recomputed: bool
) -> AbstractContextManager[Any]:
    """The context for one call of `block`, in which tensors are saved for backward."""
    if (found := _in_force.get(block)) is None:
        return nullcontext()
    offloader, moves = found
    return offloader.saving(block, arguments, is_recomputed, moves)
