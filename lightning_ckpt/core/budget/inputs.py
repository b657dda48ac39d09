"""Which of a call's inputs would be gone if they waited elsewhere, and from when on.

A checkpointed call saves its arguments. While a step is measured they are saved in boxes that we
know, so it can be asked, whenever a segment of the step ends, who else holds them: the model's own
code, operations outside of blocks, other calls. Nobody may: else nothing would be freed.
"""

import weakref
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from lightning_ckpt.core._torch import is_fake, storage_uses, tensor_version, view_base


class _Box:
    """What autograd holds in place of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an alias of its own, so that it can be told from others
        self.version = tensor_version(tensor)


class Input:
    """A storage that a call saved as an argument.

    Attributes:
        num_bytes: its size.
        producer: the call that gave it; None: none did.
        gone: the segment from which on nobody else held it; None: somebody did until its recompute.
    """

    def __init__(self, num_bytes: int, producer: int | None) -> None:
        self.num_bytes = num_bytes
        self.producer = producer
        self.gone: int | None = None
        self._boxes: list[weakref.ref[_Box]] = []

    def add(self, box: _Box) -> None:
        self._boxes.append(weakref.ref(box))

    def is_alone(self, uses_of_one: int) -> bool:
        """Whether its call alone holds it now."""
        boxes = [box for box in (reference() for reference in self._boxes) if box is not None]
        return bool(boxes) and storage_uses(boxes[0].tensor) < uses_of_one + len(boxes)


class Saved(NamedTuple):
    """What a call saved, as far as it could be moved.

    Attributes:
        alone_bytes: of what it alone held.
        shared_bytes: of the rest, but for what the call before or after it saved as well: an
            offload by plan lets that stay.
        gone: the segment from which on it held the first alone.
        producers: the calls that gave it.
    """

    alone_bytes: int
    shared_bytes: int
    gone: int
    producers: tuple[int, ...]


class InputWatch:
    """Follows the arguments of a step's calls.

    Attributes:
        state: `id` of the storages of parameters and buffers.

    Args:
        root: the model, whose parameters and buffers are never moved.
        device: where the training runs.
        min_bytes: smaller storages are never moved.
    """

    def __init__(self, root: nn.Module, device: torch.device, min_bytes: int) -> None:
        self._root = root
        self._device = device
        self.min_bytes = max(min_bytes, 1)
        self._uses_of_one = storage_uses(torch.empty(1).detach())
        self._inputs: dict[int, dict[int, Input]] = {}  # by call, and by the storage's `id`
        self._waiting: set[int] = set()  # calls
        self._producers: dict[int, int] = {}  # calls, by the `id` of what they gave
        self.state: set[int] = set()

    def begin(self) -> None:
        """A stretch of the step begins."""
        tensors = [*self._root.parameters(), *self._root.buffers()]
        self.state = {id(s) for s in (storage_of(tensor) for tensor in tensors) if s is not None}

    def saving(self, call: int) -> AbstractContextManager[Any]:
        """The context in which a call saves its arguments."""
        inputs = self._inputs.setdefault(call, {})
        self._waiting.add(call)

        def pack(tensor: Tensor) -> _Box:
            box = _Box(tensor)
            if (storage := self.movable(tensor)) is not None:
                key = id(storage)
                inputs.setdefault(key, Input(storage.nbytes(), self._producers.get(key))).add(box)
            return box

        return saved_tensors_hooks(pack, _unpack)

    def movable(self, tensor: Tensor) -> torch.UntypedStorage | None:
        """Its storage, if an offload would move that."""
        if tensor.device.type != self._device.type or isinstance(view_base(tensor), nn.Parameter):
            return None
        storage = storage_of(tensor)
        if storage is None or id(storage) in self.state or storage.nbytes() < self.min_bytes:
            return None
        return storage

    def gave(self, call: int, keys: Iterable[int]) -> None:
        """These storages outlived the forward of the call."""
        self._producers.update(dict.fromkeys(keys, call))

    def died(self, key: int) -> None:
        """This storage is gone, and another may get its `id`."""
        self._producers.pop(key, None)

    def look(self, segment: int) -> None:
        """That segment begins: see what is held by its call alone."""
        for call in self._waiting:
            for each in self._inputs[call].values():
                if each.gone is None and each.is_alone(self._uses_of_one):
                    each.gone = segment

    def settle(self, call: int) -> None:
        """Its recompute begins."""
        self._waiting.discard(call)

    def knows(self, call: int, storage: torch.UntypedStorage) -> bool:
        """Whether it is one of the call's inputs."""
        return id(storage) in self._inputs.get(call, {})

    def saved(self, call: int, returns: int) -> Saved:
        """What the call saved, and would have back from that segment on."""
        near = {*self._inputs.get(call - 1, {}), *self._inputs.get(call + 1, {})}
        inputs = [each for key, each in self._inputs.get(call, {}).items() if key not in near]
        alone = [each for each in inputs if each.gone is not None and each.gone < returns]
        return Saved(
            sum(each.num_bytes for each in alone),
            sum(each.num_bytes for each in inputs) - sum(each.num_bytes for each in alone),
            max((each.gone for each in alone if each.gone is not None), default=0),
            tuple(sorted({each.producer for each in alone if each.producer is not None})),
        )


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The storage of a plain tensor, as an offload sees it; a fake one counts as plain."""
    if type(tensor) not in (Tensor, nn.Parameter) and not is_fake(tensor):
        return None
    if tensor.layout != torch.strided or tensor.is_nested or tensor.is_quantized:
        return None
    return None if tensor.is_conj() or tensor.is_neg() else tensor.untyped_storage()


def _unpack(box: _Box) -> Tensor:
    if tensor_version(box.tensor) != box.version:
        raise RuntimeError(
            "an argument of a checkpointed block was modified by an inplace operation before its "
            f"backward (shape {tuple(box.tensor.shape)}, version {tensor_version(box.tensor)}, "
            f"expected {box.version}); clone it before"
        )
    return box.tensor
