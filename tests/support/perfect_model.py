"""A slow manager that is right by reading: no hashes, every length tried, every list walked.

It predicts each answer of `KVCacheManager` exactly: ids and the order in which they are handed out, hits, copies,
victims. Prefixes are compared token by token (tuples of tokens are the keys), a hit is the longest length for which
every group holds every block with a token that the next query reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from kvcore.spec.retention import Chunk, Full, Retention, Window

Key = tuple[int, str, tuple[int, ...]]  # group, salt, all tokens up to the block's end


@dataclass
class Sequence_:
    """A request: tokens, and per group the index of its first held block with the ids from there on."""

    salt: str
    tokens: list[int]
    held: list[int] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)
    first: list[int] = field(default_factory=list)  # of the table, as its reader has it
    offered: list[int] = field(default_factory=list)
    computed: int = 0
    committed: int = 0
    in_flight: int = 0
    last_step: int = 0
    epoch: int = 0


@dataclass
class Given:
    """What a step got."""

    hits: dict[str, int]
    new_blocks: list[tuple[int, int]]
    copies: list[tuple[int, int, int]]


class PerfectManager:
    """The blocks of one rank.

    Args:
        groups: (retention, block size) of each.
        num_blocks: Ids, the null block included.
        caching: Whether prefixes are reused.
        partial: Whether the beginnings of blocks are.
    """

    def __init__(
        self, groups: Sequence[tuple[Retention, int]], num_blocks: int, *, caching: bool = True, partial: bool = False
    ) -> None:
        self.groups, self.caching, self.partial = groups, caching, partial
        self.fresh = list(range(1, num_blocks))
        self.lru: list[int] = []
        self.pending: list[tuple[int, int]] = []  # (last reader, block) in the order of their release
        self.refs = [0] * num_blocks
        self.last_reader = [0] * num_blocks
        self.index: dict[Key, int] = {}
        self.key_of: dict[int, Key] = {}
        self.live: dict[str, Sequence_] = {}
        self.steps: dict[int, list[tuple[str, Sequence_, int]]] = {}
        self.step = self.retired = self.epoch = self.evictions = 0

    # ---- prefixes

    def key(self, group: int, request: Sequence_, block: int) -> Key:
        return group, request.salt, tuple(request.tokens[: (block + 1) * self.groups[group][1]])

    def needed(self, group: int, length: int) -> range:
        """The whole blocks that a query at `length` still reads."""
        retention, size = self.groups[group]
        return range(retention.first_needed(length) // size, length // size)

    def begun(self, group: int, request: Sequence_, length: int) -> list[int]:
        """Cached blocks that hold what a query at `length` reads of the block that it lies in, best first.

        The best one shares most with the prompt; of several the one that was cached first.
        """
        size = self.groups[group][1]
        start, limit = length // size * size, len(request.tokens) - 1
        shared: dict[int, int] = {}
        for (g, salt, tokens), block in self.index.items():
            if (g, salt) == (group, request.salt) and len(tokens) == start + size:
                like = [a == b for a, b in zip(tokens, request.tokens[:limit], strict=False)]
                common = like.index(False) if False in like else len(like)
                if common >= length:
                    shared[block] = common
        return sorted(shared, key=lambda block: -shared[block])

    def reads_inside(self, group: int, length: int) -> bool:
        retention, size = self.groups[group]
        return length % size > 0 and retention.first_needed(length) < length

    def serves(self, group: int, request: Sequence_, length: int) -> bool:
        if not all(self.key(group, request, b) in self.index for b in self.needed(group, length)):
            return False
        return not self.reads_inside(group, length) or bool(self.begun(group, request, length))

    def hit(self, request: Sequence_) -> int:
        """The longest prefix that all groups can serve, by trying each length."""
        limit = len(request.tokens) - 1 if self.caching else 0
        for length in range(limit, 0, -1):
            if not self.partial and any(length % size for _, size in self.groups):
                continue
            if all(self.serves(g, request, length) for g in range(len(self.groups))):
                return length
        return 0

    def found(self, group: int, request: Sequence_, length: int) -> list[int]:
        """The blocks of a hit; the last one is copied where `reads_inside`."""
        whole = [self.index[self.key(group, request, b)] for b in self.needed(group, length)]
        return whole + self.begun(group, request, length)[: self.reads_inside(group, length)]

    # ---- blocks

    def free_blocks(self) -> int:
        return len(self.fresh) + len(self.lru)

    def take(self) -> int:
        if self.fresh:
            block = self.fresh.pop(0)
        else:
            block = self.lru.pop(0)
            del self.index[self.key_of.pop(block)]
            self.evictions += 1
        self.refs[block], self.last_reader[block] = 1, 0
        return block

    def share(self, block: int) -> None:
        self.refs[block] += 1
        for waiting in (self.fresh, self.lru):
            if block in waiting:
                waiting.remove(block)
        self.pending = [(s, b) for s, b in self.pending if b != block]

    def release(self, block: int, reader: int) -> None:
        self.refs[block] -= 1
        self.last_reader[block] = max(self.last_reader[block], reader)
        if self.refs[block] == 0:
            self.pending.append((self.last_reader[block], block))
            self.settle()

    def settle(self) -> None:
        """Blocks whose last reader is done become free: those of earlier steps first, then as they were released."""
        for step, block in sorted(self.pending, key=lambda entry: entry[0]):
            if step <= self.retired:
                (self.lru if block in self.key_of else self.fresh).append(block)
        self.pending = [(step, block) for step, block in self.pending if step > self.retired]

    # ---- what a scheduler does

    def begin(self, name: str, tokens: Sequence[int], salt: str) -> None:
        self.live[name] = Sequence_(salt, list(tokens))

    def plan(self, asks: Sequence[tuple[str, int]]) -> tuple[int, dict[str, int], dict[str, list[int]]]:
        """(free blocks used up, hits, groups to copy) of a step."""
        used, revived, holders = 0, set[int](), dict[int, int]()
        hits: dict[str, int] = {}
        copies: dict[str, list[int]] = {}
        for name, count in asks:
            request = self.live[name]
            copies[name] = []
            if not request.ids:
                hits[name] = start = self.hit(request)
                for g in range(len(self.groups)):
                    revived |= {b for b in self.found(g, request, start) if b in self.fresh or b in self.lru}
                    if self.reads_inside(g, start):
                        copies[name].append(g)
                ends = [start // size for _, size in self.groups]
            else:
                start = request.computed
                ends = [h + len(ids) for h, ids in zip(request.held, request.ids, strict=True)]
                for g, (_, size) in enumerate(self.groups):
                    if start % size and request.ids[g]:
                        last = request.ids[g][-1]
                        if holders.get(last, self.refs[last]) > 1:
                            holders[last] = holders.get(last, self.refs[last]) - 1
                            copies[name].append(g)
            used += sum(-(-(start + count) // size) - e for (_, size), e in zip(self.groups, ends, strict=True))
            used += len(copies[name]) if request.ids else 0  # who enters counts the block as a new one
        return used + len(revived), hits, copies

    def short(self, asks: Sequence[tuple[str, int]]) -> int:
        return max(0, self.plan(asks)[0] - self.free_blocks())

    def allocate(self, asks: Sequence[tuple[str, int]]) -> Given:
        _, hits, copies = self.plan(asks)
        self.step += 1
        for name, hit in hits.items():
            request = self.live[name]
            request.epoch = self.epoch
            for g, (retention, size) in enumerate(self.groups):
                found = self.found(g, request, hit)
                for block in found:
                    self.share(block)
                request.ids.append(found)
                request.held.append(retention.first_needed(hit) // size)
                # A block that is begun where a chunk begins never holds the tokens before it.
                request.offered.append(hit // size + (hit % size > 0 and not self.reads_inside(g, hit)))
            request.first = list(request.held)
            request.computed = request.committed = hit
        given = Given(hits, [], [])
        for name, count in asks:
            request = self.live[name]
            start, end = request.computed, request.computed + count
            for g, (retention, size) in enumerate(self.groups):
                request.first[g] = max(request.first[g], retention.first_needed(start) // size)
                if g in copies[name]:
                    shared, own = request.ids[g][-1], self.take()
                    request.ids[g][-1] = own
                    self.release(shared, self.step)
                    given.copies.append((g, shared, own))
                    given.new_blocks.append((g, own))
                while request.held[g] + len(request.ids[g]) < -(-end // size):
                    block = self.take()
                    request.ids[g].append(block)
                    given.new_blocks.append((g, block))
            request.computed, request.last_step = end, self.step
            request.in_flight += 1
        self.steps[self.step] = [(name, self.live[name], self.live[name].computed) for name, _ in asks]
        return given

    def commit(self, step: int, sampled: dict[str, list[int]]) -> None:
        for name, request, end in self.steps.pop(step):
            if self.live.get(name) is not request:
                continue
            request.tokens += sampled.get(name, [])
            request.in_flight -= 1
            request.committed = end
            for g, (retention, size) in enumerate(self.groups):
                ids, held = request.ids[g], request.held[g]
                reads_nothing = isinstance(retention, Window | Chunk) and retention.size == 1
                for b in range(request.offered[g], end // size):
                    request.offered[g] = b + 1
                    key = self.key(g, request, b)
                    if not reads_nothing and self.caching and request.epoch == self.epoch and key not in self.index:
                        self.index[key] = ids[b - held]
                        self.key_of[ids[b - held]] = key
            for g, (retention, size) in enumerate(self.groups):
                gone = max(0, retention.first_needed(end) // size - request.held[g])
                kept = request.ids[g][gone:]
                if isinstance(retention, Window | Chunk) and retention.size == 1 and not request.in_flight:
                    for block in reversed(kept):
                        self.release(block, step)
                    kept = []
                for block in reversed(request.ids[g][:gone]):
                    self.release(block, step)
                request.held[g] += min(gone, len(request.ids[g]))
                request.ids[g] = kept
                request.first[g] = max(request.first[g], request.held[g])

    def retire(self, step: int) -> None:
        self.retired = max(self.retired, step)
        self.settle()

    def free(self, names: Sequence[str]) -> None:
        for name in names:
            request = self.live.pop(name)
            ends = [
                ((held + i + 1) * size, block)
                for (_, size), held, ids in zip(self.groups, request.held, request.ids, strict=False)
                for i, block in enumerate(ids)
            ]
            for _, block in sorted(ends, key=lambda pair: -pair[0]):
                self.release(block, request.last_step)

    def fork(self, parent: str, children: Sequence[str]) -> None:
        source = self.live[parent]
        for name in children:
            child = Sequence_(source.salt, list(source.tokens))
            child.held, child.first = list(source.held), list(source.first)
            child.ids = [list(ids) for ids in source.ids]
            child.offered = list(source.offered)
            for key in ("computed", "committed", "in_flight", "last_step", "epoch"):
                setattr(child, key, getattr(source, key))
            self.live[name] = child
            for ids in child.ids:
                for block in ids:
                    self.share(block)
            for members in self.steps.values():
                members += [(name, child, end) for _, member, end in members if member is source]

    def reset(self) -> None:
        """Cached blocks that are free lose their content in the order in which they were cached, group by group."""
        for g in range(len(self.groups)):
            for key, block in self.index.items():
                if key[0] == g:
                    del self.key_of[block]
                    if block in self.lru:
                        self.lru.remove(block)
                        self.fresh.append(block)
        self.index.clear()
        self.epoch += 1

    def table(self, name: str, group: int) -> tuple[int, list[int]]:
        request = self.live[name]
        if not request.ids:
            return 0, []
        return request.first[group], request.ids[group][request.first[group] - request.held[group] :]

    def stats(self) -> dict[str, int]:
        """Those counters of `KVCacheManager.stats` that the order of blocks decides."""
        return {
            "blocks_free": self.free_blocks(),
            "blocks_pending": len(self.pending),
            "blocks_cached": len(self.index),
            "evictions": self.evictions,
        }


SHAPES: tuple[Retention, ...] = (Full(), Window(1), Window(2), Window(5), Window(8), Chunk(1), Chunk(4), Chunk(6))
