"""`Sequences`: which request of the block manager each sequence of a padded batch is. Integers alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, groupby

import numpy as np
import numpy.typing as npt

from kvcore.backend import ConfigError, NotBuiltError
from kvcore.cache import KVCacheManager, PagedCache

Tokens = npt.NDArray[np.int64]
_SALTS = count()


@dataclass(frozen=True)
class Part:
    """A request's part of a step.

    Attributes:
        row: The request.
        lanes: The sequences of the batch that it is.
        start: Tokens of it that are in the cache.
        count: Tokens that the step computes.
    """

    row: int
    lanes: list[int]
    start: int
    count: int


class Sequences:
    """The sequences of a batch as requests of a manager.

    Sequences with the same tokens are one request: computed once, with one set of blocks. Where they part, the
    request is forked: whole blocks stay shared, and a block that is partly filled is copied by whoever writes first.

    Args:
        paged: The cache.

    Attributes:
        manager: The manager of its blocks.
        rows: By sequence, its request; -1 where it has had only padding.
        fed: By sequence, its tokens so far.
        in_flight: The step that was begun and has not finished.
    """

    def __init__(self, paged: PagedCache) -> None:
        self._paged = paged
        self.manager: KVCacheManager = paged.make_manager()
        self.rows: list[int] = []
        self.fed: list[int] = []
        self.in_flight: int | None = None

    def find(self, tokens: Sequence[Tokens]) -> list[int]:
        """Begin sequences with whatever the prefix cache holds of them; returns how many tokens of each it holds."""
        known: dict[bytes, int] = {}
        for own in tokens:
            if own.tobytes() not in known:
                known[own.tobytes()] = self.manager.begin(own.tolist()) if len(own) else -1
        self.rows = [known[own.tobytes()] for own in tokens]
        return [self.manager.lookup(row) if row >= 0 else 0 for row in self.rows]

    def tell(self, new: Sequence[Tokens]) -> list[Part]:
        """Tell the next tokens of each sequence, none for one that has only padding yet; returns the step they take.

        Raises:
            ConfigError: They are not those that `find` was told.
            NotBuiltError: All of them were found: nothing is left to be computed.
        """
        parts = self._parts(self._members(new), new)
        self.fed = [fed + len(own) for fed, own in zip(self.fed, new, strict=True)]
        return sorted(parts, key=lambda part: part.count > 1 or not part.start)  # decodes first

    def begin(self, parts: Sequence[Part]) -> None:
        """Start the step of these parts.

        Raises:
            OutOfBlocksError: Too few blocks.
        """
        manager, admitted = self.manager, self.manager.requests.admitted
        step = manager.begin_step()
        for running, some in groupby(parts, key=lambda part: bool(admitted[part.row])):
            if running:
                rows, counts = zip(*((part.row, part.count) for part in some), strict=True)
                step.add(np.array(rows), np.array(counts))
            else:
                for part in some:
                    step.enter(part.row, part.count)
        allocation = manager.allocate(step)
        self.in_flight = allocation.step
        self._paged.begin_allocated(allocation)

    def _members(self, new: Sequence[Tokens]) -> dict[int, list[int]]:
        """The sequences that each request is, those that part from another forked."""
        found: dict[tuple[int, bytes], int] = {}
        members: dict[int, list[int]] = {}
        for lane, (row, own) in enumerate(zip(self.rows, new, strict=True)):
            if not len(own):
                continue
            key = row, own.tobytes()
            if key not in found:
                if row < 0:  # a salt of its own: what was not looked up by `find` is neither found nor offered
                    found[key] = self.manager.begin(own.tolist(), salt=f"alone {next(_SALTS)}")
                else:
                    self._check_told(row, lane, own)
                    found[key] = self.manager.fork(row, [""])[0] if row in members else row
            self.rows[lane] = found[key]
            members.setdefault(found[key], []).append(lane)
        return members

    def _check_told(self, row: int, lane: int, own: Tokens) -> None:
        told = self.manager.requests.tokens.view(row)[self.fed[lane] :][: len(own)]
        if not np.array_equal(told, own[: len(told)]):
            raise ConfigError(
                "these are not the tokens that reuse() was told",
                field="input_ids",
                got=f"other tokens in sequence {lane}",
                allowed="the same prompts",
                remedy="call reset() on the cache first",
            )

    def _parts(self, members: dict[int, list[int]], new: Sequence[Tokens]) -> list[Part]:
        requests, parts = self.manager.requests, []
        for row, lanes in members.items():
            fed, own = self.fed[lanes[0]], new[lanes[0]]
            end, known = fed + len(own), int(requests.known[row])
            if end > known:
                self.manager.extend(row, own[known - fed :].tolist())
            start = int(requests.computed[row]) if requests.admitted[row] else self.manager.lookup(row)
            if start >= end:
                raise NotBuiltError(
                    "a sequence of this pass is in the cache as a whole, so that its last token would not be computed",
                    field="prefill_chunk_size",
                    got=len(own),
                    allowed="None, or more columns",
                )
            parts.append(Part(row, lanes, start, end - start))
        return parts

    def finish(self) -> None:
        """The step is computed: what it filled can be found again."""
        if self.in_flight is not None:
            self.manager.commit(self.in_flight)
            self.manager.retire(self.in_flight)
            self.in_flight = None

    def select(self, lanes: Sequence[int]) -> None:
        """Make sequence i what sequence ``lanes[i]`` was; requests that are nobody's give their blocks up."""
        before = self.rows
        self.rows, self.fed = [self.rows[i] for i in lanes], [self.fed[i] for i in lanes]
        self._free(set(before) - set(self.rows))

    def clear(self) -> None:
        """End all sequences. What a step that did not finish computed is forgotten."""
        rows, self.rows, self.fed = set(self.rows), [], []
        self._free(rows, forget=self.in_flight is not None)
        self.finish()

    def _free(self, rows: set[int], *, forget: bool = False) -> None:
        gone = sorted(rows - {-1})
        if gone:
            self.manager.free(gone, forget=forget)
        for row in gone:
            self._paged.leave(row)

    def truncate(self, keeps: Sequence[int]) -> None:
        """Keep the first ``keeps[i]`` tokens of sequence i.

        A request is begun anew with fewer tokens; blocks that the prefix cache does not give it are copied from the
        old one, so that others who share those, or could find them, lose nothing.

        Raises:
            NotBuiltError: A window has let go of tokens that the shorter sequence reads.
            OutOfBlocksError: Too few blocks.
        """
        made = {-1: -1}
        for row, keep, fed in zip(self.rows, keeps, self.fed, strict=True):
            if row not in made:
                made[row] = row if keep == fed else self._shorter(row, keep) if keep else -1
        self.rows, self.fed = [made[row] for row in self.rows], list(keeps)
        self._free({old for old, new in made.items() if old != new})

    def _shorter(self, row: int, keep: int) -> int:
        manager, requests = self.manager, self.manager.requests
        new = manager.begin(requests.tokens.view(row)[:keep].tolist(), salt=requests.origin(row).salt)
        step = manager.begin_step()
        step.enter(new, keep - manager.lookup(new))
        allocation = manager.allocate(step)
        copies, lost = [], False
        for group, block in allocation.new_blocks.tolist():
            first, blocks = manager.table(new, group)
            at = first + blocks.index(block)
            old_first, old = manager.table(row, group)
            if old_first <= at < old_first + len(old):
                copies.append((group, old[at - old_first], block))
            else:
                lost = True
        self._paged.leave(row)  # its place is the new one's; the blocks stay the manager's until the end
        if not lost:
            self._paged.enter(new)
            self._paged.change(allocation.deltas, np.array(copies), allocation.new_blocks, allocation.dead)
        else:
            manager.free([new], forget=True)
        manager.commit(allocation.step)
        manager.retire(allocation.step)
        if lost:
            raise NotBuiltError(
                "a window has let go of tokens that the shorter sequence reads",
                field="tokens_to_remove",
                got=int(requests.known[row]) - keep,
                allowed="what keeps the sequence within the window, or all of it",
                remedy="call reset() on the cache and compute the prompt again",
            )
        return new
