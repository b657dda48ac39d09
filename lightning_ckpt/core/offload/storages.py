"""What is known of storages, for as long as they live."""

import weakref
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class StorageMap(Generic[T]):
    """A value for each of some live storages.

    Entries go by the storage's Python object, which torch keeps as long as the storage lives, and
    end with it: never by an address, which the next storage may get. (The weak references are not
    followed, only their callbacks used: torch 2.8 loses a storage that is reached by one.)
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[torch.UntypedStorage], T]] = {}

    def put(self, storage: torch.UntypedStorage, value: T) -> None:
        key, entries = id(storage), self._entries

        def forget(dead: "weakref.ref[torch.UntypedStorage]") -> None:
            if key in entries and entries[key][0] is dead:
                del entries[key]

        entries[key] = weakref.ref(storage, forget), value

    def get(self, storage: torch.UntypedStorage) -> T | None:
        """The value of this storage, or None."""
        entry = self._entries.get(id(storage))
        return None if entry is None else entry[1]

    def clear(self) -> None:
        self._entries.clear()

    def __len__(self) -> int:
        return len(self._entries)
