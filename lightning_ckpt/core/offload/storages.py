"""What is known of storages, for as long as they live."""

from typing import Generic, TypeVar

import torch

from lightning_ckpt.core.offload.lifetimes import Lifetimes

T = TypeVar("T")


class StorageMap(Generic[T]):
    """A value for each of some live storages.

    Entries go by the storage's Python object, which torch keeps as long as the storage lives, and
    end with it: never by an address, which the next storage may get. (No weak reference is
    followed: torch 2.8 loses a storage that is reached by one.)
    """

    def __init__(self) -> None:
        self._values: dict[int, T] = {}
        self._lifetimes: Lifetimes[int] = Lifetimes()

    def put(self, storage: torch.UntypedStorage, value: T) -> None:
        self._forget_the_dead()
        if id(storage) not in self._values:
            self._lifetimes.watch(storage, id(storage))
        self._values[id(storage)] = value

    def get(self, storage: torch.UntypedStorage) -> T | None:
        """The value of this storage, or None."""
        self._forget_the_dead()
        return self._values.get(id(storage))

    def clear(self) -> None:
        self._values.clear()
        self._lifetimes = Lifetimes()

    def __len__(self) -> int:
        self._forget_the_dead()
        return len(self._values)

    def _forget_the_dead(self) -> None:
        for key in self._lifetimes.ended():
            self._values.pop(key, None)
