"""`BlockQueue`: block ids in the order in which they came, each of which can also leave from the middle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvcore.errors import IntegrityError
from kvcore.manage.ragged import Ints

NOWHERE = -1
_SLACK = 256
QUEUES = 16  # how many queues one array of places can tell apart


class BlockQueue:
    """First in, first out; many ids a call, constant time each.

    ::

        buffer  [ . | 5 | 9 | 2 | 7 | . ]        place[5] = 1 * 16 + tag, ...
                     head         tail           a block left if its place is another one

    An id that leaves from the middle stays behind in the buffer until the head comes to it, or until the buffer
    is full and is packed.

    Args:
        place: int32 by block id, shared by the queues of a pool: where a block is. It is in one of them at most.
        tag: Number of this queue, below `QUEUES`.
        blocks: Ids to begin with.
    """

    def __init__(self, place: Ints, tag: int, blocks: Ints) -> None:
        self._place = place
        self._tag = tag
        self._buffer = np.zeros(0, np.int32)
        self._head = self._tail = self._size = 0
        self.append(blocks)

    def __len__(self) -> int:
        """Ids in the queue."""
        return self._size

    def __iter__(self) -> Iterator[int]:
        """From the first to the last."""
        waiting = self._buffer[self._head : self._tail]
        return iter(waiting[self._live(self._head, self._tail)].tolist())

    def append(self, blocks: Ints) -> None:
        """Put these last, in their order; none of them is in a queue."""
        end = self._tail + len(blocks)
        if end > len(self._buffer):
            self._pack(len(blocks))
            end = self._tail + len(blocks)
        places = self._places(self._tail, end)
        self._buffer[self._tail : end] = blocks
        self._place[blocks] = places
        if np.count_nonzero(self._place[blocks] != places):
            raise IntegrityError("a block enters a queue twice", field="block", got=blocks.tolist())
        self._tail = end
        self._size += len(blocks)

    def remove(self, blocks: Ints) -> None:
        """Take these out, wherever they are; all of them are in this queue."""
        self._place[blocks] = NOWHERE
        self._size -= len(blocks)

    def pop(self, count: int) -> Ints:
        """Take out and return the first `count`, int32; the queue holds as many."""
        blocks, self._head = self.peek(count)
        self.remove(blocks)
        return blocks

    def peek(self, count: int) -> tuple[Ints, int]:
        """The first `count`, and the head once they are gone; the queue holds as many."""
        if self._size == self._tail - self._head:  # nobody has left from the middle
            end = self._head + count
            return self._buffer[self._head : end].copy(), end
        found, missing, head = [self._buffer[:0]], count, self._head
        while missing:
            end = min(self._tail, head + max(missing, 64))
            live = self._live(head, end).nonzero()[0][:missing]
            found.append(self._buffer[head + live])
            missing -= len(live)
            head = end if missing else head + int(live[-1]) + 1
        return found[1] if len(found) == 2 else np.concatenate(found), head

    def _places(self, start: int, end: int) -> Ints:
        return np.arange(start * QUEUES + self._tag, end * QUEUES + self._tag, QUEUES, dtype=np.int32)

    def _live(self, start: int, end: int) -> Ints:
        live: Ints = self._place[self._buffer[start:end]] == self._places(start, end)
        return live

    def _pack(self, more: int) -> None:
        """Move what is in the queue to the front of a buffer with room for `more`."""
        waiting = self._buffer[self._head : self._tail][self._live(self._head, self._tail)]
        needed = len(waiting) + more
        # A quarter of slack: packing then costs four moves an id, and the buffer five bytes.
        self._buffer = np.zeros(needed + max(needed // 4, _SLACK), np.int32)
        self._buffer[: len(waiting)] = waiting
        self._head, self._tail = 0, len(waiting)
        self._place[waiting] = self._places(0, len(waiting))
