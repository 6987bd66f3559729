"""`Ragged`: rows of integers of unlike length in one flat array."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[Any]  # integers; the width is said where it matters

_SMALLEST = 16  # entries of the smallest segment


def spans(starts: Ints, counts: Ints) -> Ints:
    """The numbers ``starts[i] .. starts[i] + counts[i] - 1`` for all i, in order, as one int64 array."""
    if len(counts) == 1:
        return np.arange(starts[0], starts[0] + counts[0])
    ends = counts.cumsum()
    total = int(ends[-1]) if len(ends) else 0
    if total == len(counts) == np.count_nonzero(counts):  # one each
        return starts
    return np.repeat(starts - ends + counts, counts) + np.arange(total)


class Ragged:
    """Rows that grow at their ends and shrink at their fronts; a change of many rows is a few array operations.

    ::

        data   | 5 8 7 . | . . | 3 1 4 1 5 9 2 . |
        row 0: start 0, size 3         row 1: start 7, size 6 (its first entry was dropped)

    A row lies in a segment of a power of two of entries, and moves to one of twice the room when it is full, so
    that n entries cost O(n). A segment that was left serves the next row that needs one of its size.

    Args:
        dtype: Of the entries.

    Attributes:
        data: The flat array; a new one whenever it grows.
        start, size: int64, by row: where it begins, and its entries.
    """

    def __init__(self, dtype: npt.DTypeLike) -> None:
        self.data: Ints = np.zeros(1024, dtype)
        self.start: Ints = np.zeros(0, np.int64)
        self.size: Ints = np.zeros(0, np.int64)
        self._end: Ints = np.zeros(0, np.int64)  # of the segment
        self._room: Ints = np.zeros(0, np.int64)  # entries of the segment; 0 without one
        self._spare: dict[int, list[int]] = {}  # starts of segments that nobody uses, by their room
        self._top = 0

    def widen(self, rows: int) -> None:
        """Make room for `rows` rows; new ones are empty."""
        more = rows - len(self.size)
        for name in ("start", "size", "_end", "_room"):
            setattr(self, name, np.concatenate((getattr(self, name), np.zeros(more, np.int64))))

    def view(self, row: int) -> Ints:
        """The entries of a row, valid until anything grows."""
        start = int(self.start[row])
        return self.data[start : start + int(self.size[row])]

    def append(self, rows: Ints, values: Ints) -> None:
        """One entry for each of these rows, which are distinct."""
        at = self.start[rows] + self.size[rows]
        full = at >= self._end[rows]
        if np.count_nonzero(full):
            self._move(rows[full], self.size[rows[full]] + 1)
            at = self.start[rows] + self.size[rows]
        self.data[at] = values
        self.size[rows] += 1

    def extend(self, rows: Ints, counts: Ints, values: Ints) -> None:
        """For row i the next ``counts[i]`` values; the rows are distinct."""
        size = self.size[rows]
        need = size + counts
        full = self.start[rows] + need > self._end[rows]
        if np.count_nonzero(full):
            self._move(rows[full], need[full])
        self.data[spans(self.start[rows] + size, counts)] = values
        self.size[rows] = need

    def assign(self, row: int, values: Ints) -> None:
        """Make these the entries of a row that is empty."""
        count = len(values)
        if count > self._room[row]:
            self._move(np.array([row]), np.array([count]))
        start = int(self.start[row])
        self.data[start : start + count] = values
        self.size[row] = count

    def gather(self, rows: Ints, offsets: Ints, counts: Ints) -> Ints:
        """For each row the ``counts[i]`` entries from index ``offsets[i]`` on, one after the other."""
        found: Ints = self.data[spans(self.start[rows] + offsets, counts)]
        return found

    def pieces(self, rows: Ints, offsets: Ints, counts: Ints, length: int) -> Ints:
        """[sum of counts, length]: `gather`, of ``counts[i]`` pieces of `length` entries of each row."""
        at = self.start[rows] + offsets
        if np.count_nonzero(counts != 1):
            at = np.repeat(at, counts) + spans(np.zeros_like(counts), counts) * length
        step = self.data.itemsize
        windows = np.ndarray((len(self.data) - length + 1, length), self.data.dtype, self.data, 0, (step, step))
        found: Ints = windows[at]
        return found

    def drop_front(self, rows: Ints, counts: Ints) -> Ints:
        """Take the first ``counts[i]`` entries out of each row; returns them, of each row the last first."""
        start = self.start[rows]
        if len(rows) == 1:
            dropped: Ints = self.data[start[0] : start[0] + counts[0]][::-1].copy()
        else:
            ends = counts.cumsum()
            # Of row i the numbers start + count - 1 .. start.
            dropped = self.data[np.repeat(start + ends - 1, counts) - np.arange(ends[-1] if len(ends) else 0)]
        self.start[rows] = start + counts
        self.size[rows] -= counts
        return dropped

    def clear(self, rows: Ints) -> None:
        """Empty rows and give their segments away."""
        rooms, ends = self._room[rows], self._end[rows]
        for room in set(rooms.tolist()) - {0}:
            self._spare.setdefault(room, []).extend((ends[rooms == room] - room).tolist())
        self.start[rows] = self.size[rows] = self._end[rows] = self._room[rows] = 0

    def _move(self, rows: Ints, needed: Ints) -> None:
        for row, need in zip(rows.tolist(), needed.tolist(), strict=True):
            room = max(_SMALLEST, 1 << (need - 1).bit_length())
            spare = self._spare.get(room)
            if spare:
                at = spare.pop()
            else:
                at = self._top
                self._top += room
                if self._top > len(self.data):
                    grown = np.zeros(max(2 * len(self.data), self._top), self.data.dtype)
                    grown[: len(self.data)] = self.data
                    self.data = grown
            size = int(self.size[row])
            self.data[at : at + size] = self.view(row)
            self.clear(np.array([row]))
            self.start[row], self.size[row], self._end[row], self._room[row] = at, size, at + room, room
