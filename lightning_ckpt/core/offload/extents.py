"""Room in a file or in a large buffer: which stretches of it are free."""

from bisect import bisect_left, insort


class Extents:
    """Free stretches of `[0, end)`, in order of their offsets; the end moves as room is needed.

    Stretches of mixed lengths, taken and given back in any order, use no more than they need at
    their worst moment plus what falls between them: neighbours that are free become one, and free
    room at the end is given up.

    Args:
        limit: the end may not move beyond it, in bytes; None: there is no limit.
        unit: lengths are rounded up to multiples of it, in bytes.
    """

    def __init__(self, limit: int | None = None, unit: int = 4096) -> None:
        self.end = 0
        self._limit = limit
        self._unit = unit
        self._free: list[tuple[int, int]] = []  # offset, length

    def take(self, num_bytes: int) -> tuple[int, int] | None:
        """The offset and length of the smallest free stretch that holds `num_bytes`, or None."""
        length = -(-num_bytes // self._unit) * self._unit
        fitting = [stretch for stretch in self._free if stretch[1] >= length]
        if fitting:
            offset, room = min(fitting, key=lambda stretch: stretch[1])
            self._free.remove((offset, room))
            if room > length:
                insort(self._free, (offset + length, room - length))
            return offset, length
        if self._limit is not None and self.end + length > self._limit:
            return None
        self.end += length
        return self.end - length, length

    def give_back(self, offset: int, length: int) -> None:
        """Take back what `take` gave."""
        index = bisect_left(self._free, (offset, length))
        if index < len(self._free) and self._free[index][0] == offset + length:
            length += self._free.pop(index)[1]
        if index > 0 and sum(self._free[index - 1]) == offset:
            before, more = self._free.pop(index - 1)
            offset, length = before, length + more
        if offset + length == self.end:
            self.end = offset
        else:
            insort(self._free, (offset, length))
