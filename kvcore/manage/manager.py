"""`KVCacheManager`: what a scheduler calls, one call a step for all requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcore.errors import IntegrityError, RequestError
from kvcore.manage.block_hash import BlockHasher, Extra, check_extras, token_array
from kvcore.manage.block_pool import BlockPool
from kvcore.manage.dead_blocks import DeadBlocks
from kvcore.manage.events import Cleared, Event, EventLog, Removed, Stored
from kvcore.manage.eviction import LRU, EvictionPolicy
from kvcore.manage.explain import Explainer, Miss
from kvcore.manage.group_rule import hash_block_size, rules_of
from kvcore.manage.integrity import check_rows
from kvcore.manage.prefix_cache import Hit, PrefixCache
from kvcore.manage.ragged import Ints, spans
from kvcore.manage.requests import NEVER, Origin, Requests
from kvcore.manage.step import Look, Step, StepAllocation, TableDeltas
from kvcore.plan.config import KVCacheConfig

_NOBODY: Ints = np.zeros(0, np.int64)
_NONE: Ints = np.zeros(0, np.int32)
_NO_CHANGE = TableDeltas(*[_NONE] * 6), _NONE.reshape(0, 3), _NONE.reshape(0, 2)


class KVCacheManager:
    """Owns every block id of one rank; never sees a tensor.

    A request lives under a number, its row: ``begin``, then any number of ``allocate`` and ``commit`` pairs, then
    ``free``. Up to any number of steps may be in flight between the two; they are committed in order. An id that
    was given up is handed out again only after the last step that may read it was retired.

    Args:
        config: The plan of this rank.
        prefix_caching: Whether prefixes are reused.
        hash_name: ``sha256`` or ``xxh3-128``.
        namespace: Fingerprint of model and layout, where the digest chains start.
        eviction: Class of the eviction policy; least recently used when None.
        explain_history: Requests to remember, so that `explain_miss` can compare.
        events: Collect events for `take_events`; they pile up until taken.
        track_dead: Report in each step the blocks whose content died, so that it can be poisoned.

    Attributes:
        requests: What is known of each row; read only.

    Raises:
        NotBuiltError: The config needs a retention or a placement that is not built yet.
        ConfigError: The hash is unknown or not installed.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        prefix_caching: bool = True,
        hash_name: str = "sha256",
        namespace: bytes = b"",
        eviction: type[EvictionPolicy] | None = None,
        explain_history: int = 0,
        events: bool = False,
        track_dead: bool = False,
    ) -> None:
        self._rules = rules_of(config)
        self.requests = Requests(self._rules)
        self._prefix_caching = prefix_caching
        self._hasher = BlockHasher(hash_block_size(self._rules), name=hash_name, namespace=namespace)
        self._cache = PrefixCache(self._rules, config.num_blocks)
        self._stores = np.array([not r.stores_nothing for r in self._rules])
        self._dead = DeadBlocks(config.num_blocks, enabled=track_dead)
        self._pool = BlockPool(
            config.num_blocks, policy=eviction or LRU, on_evict=self._evicted, on_death=self._dead.died
        )
        self._events = EventLog(enabled=events)
        self._explainer = Explainer(self._rules, self._cache, self.requests, explain_history, enabled=prefix_caching)
        self._open: Step | None = None  # begun, and nothing changed since
        self._steps: dict[int, tuple[Ints, Ints]] = {}  # not committed: (rows, ends)
        self._hits: dict[int, tuple[int, Hit]] = {}  # the last lookup by row, and the version that it holds for
        self._step = 0
        self._epoch = 0
        self._version = 0  # of the prefix index
        self._peak = self._hit_tokens = self._query_tokens = self._copied = 0

    # ---- a request enters

    def begin(self, token_ids: Sequence[int], *, salt: str = "", extras: Sequence[Extra] = (), name: str = "") -> int:
        """Register a request; it takes no blocks before its first step.

        Args:
            token_ids: The prompt (and what was generated before a preemption), at least one token.
            salt: Only requests of equal salt share prefixes.
            extras: `Adapter`, `Multimodal` and `Embeddings` facts that the content depends on.
            name: What people call it, in errors and explanations.

        Returns:
            Its row; rows of requests that were freed are used again.

        Raises:
            RequestError: Tokens or extras are malformed.
        """
        tokens = token_array(token_ids)
        if not len(tokens):
            raise RequestError("a request needs at least one token", field="token_ids", got=0, allowed=">= 1")
        checked = check_extras(extras)
        chain = self._hasher.chain(salt, checked)
        return self.requests.open(Origin(name, len(tokens), salt, checked), chain, tokens)

    def fork(self, parent: int, names: Sequence[str]) -> list[int]:
        """Make children that share all blocks of the parent, and are part of its steps in flight.

        Whoever first writes into a shared, partly filled block copies it at its next `allocate`. To sample
        n continuations of one prompt, fork between `allocate` and `commit` of the step that ends the
        prompt, and commit a token for each.

        Returns:
            Their rows, one for each name.

        Raises:
            RequestError: An unknown parent, or one with a step in flight that computes a token not known
                yet (parent and child would share that token).
        """
        r = self.requests
        r.check(np.array([parent]))
        if r.computed[parent] > r.known[parent]:
            raise RequestError(
                "the parent already computes a token that was not committed",
                field="parent",
                got=r.name(parent),
                remedy="commit its steps in flight first",
            )
        self._open = None
        r.shared[parent] = r.admitted[parent]
        r.quiet_to[parent] = 0
        children = [r.copy(parent, name) for name in names]
        blocks = np.concatenate([r.blocks.view(parent * r.groups + g) for g in range(r.groups)])
        for _ in children:
            self._pool.share(blocks)
        for step, (rows, ends) in self._steps.items():
            mine = ends[rows == parent]
            if len(mine):
                more = np.array(children, np.int64)
                self._steps[step] = np.concatenate((rows, more)), np.concatenate((ends, np.repeat(mine, len(more))))
        return children

    # ---- a step

    def lookup(self, row: int) -> int:
        """Tokens that a request, not yet admitted, would get from the prefix cache now."""
        self.requests.check(np.array([row]))
        if self.requests.admitted[row]:
            raise RequestError("this request is admitted already", field="row", got=self.requests.name(row))
        return self._find_hit(row).tokens

    def begin_step(self) -> Step:
        """An empty step, to be filled by `Step.add` and `Step.try_add` and then given to `allocate`.

        It is void once blocks change hands otherwise: by another step, a commit, a retirement, a fork, a free,
        or a reset.
        """
        self._open = self.sketch_step()
        return self._open

    def sketch_step(self) -> Step:
        """A step that is only counted (`Step.short`), never allocated."""
        return Step(self.requests, self._pool, self._find_hit)

    def allocate(self, step: Step) -> StepAllocation:
        """Give a whole step its blocks, or change nothing.

        A request that is not admitted yet is, with the longest prefix that the cache holds now; what is
        scheduled counts tokens beyond it. The content that a step computes can be hit only after the step
        is committed.

        Args:
            step: What `begin_step` began.

        Raises:
            OutOfBlocksError: Too few free blocks; nothing has changed.
            IntegrityError: The step is void, because blocks changed hands since it was begun.
        """
        step.require(void=step is not self._open)
        self._open = None
        self._step = number = self._step + 1
        # Hits first: a block that is held can no longer be evicted by the rest of the step.
        cached = {entry.row: self._admit(entry.row, entry.hit) for entry in step.entries}
        rows, ends, limits, look = step.whole()
        r = self.requests
        r.computed[rows] = ends
        r.limit[rows] = limits + 1
        r.last_step[rows] = number
        self._steps[number] = rows, ends
        deltas, copies, new_blocks = self._extend(look, number) if look is not None else _NO_CHANGE
        self._copied += len(copies)
        self._peak = max(self._peak, self._pool.num_used)
        dead = self._dead.drain(new_blocks)
        return StepAllocation(number, rows, ends, deltas, copies, new_blocks, cached, dead)

    def _admit(self, row: int, hit: Hit) -> int:
        r = self.requests
        self._explainer.admitted(row, hit.tokens)
        for group, (first, blocks) in enumerate(zip(hit.first_blocks, hit.blocks, strict=True)):
            found = np.array(blocks, np.int64)
            self._pool.share(found)
            r.blocks.assign(row * r.groups + group, found)
            r.first[row, group] = first
            r.end[row, group] = r.offered[row, group] = first + len(blocks)
        r.epoch[row] = self._epoch
        r.admitted[row] = r.entering[row] = True
        r.computed[row] = r.committed[row] = hit.tokens
        self._hits.pop(row, None)
        self._hit_tokens += hit.tokens
        self._query_tokens += int(r.known[row])
        return hit.tokens

    def _extend(self, look: Look, step: int) -> tuple[TableDeltas, Ints, Ints]:
        """Take the blocks, grow the rows by them, and say how; hits are in the rows already."""
        r = self.requests
        rows, starts, _, need, copied = look
        flat, counts = r.flat(rows), need.ravel()
        ids = self._pool.take(int(counts.sum()))
        groups = np.tile(np.arange(r.groups), len(rows))
        new_blocks = np.stack((np.repeat(groups, counts), ids), axis=1).astype(np.int32)
        held, kept_to = r.held(rows), r.end.take(rows, axis=0)
        copies = np.zeros((0, 3), np.int32)
        if copied:
            at = np.array([i * r.groups + group for i, group in copied])
            first = counts.cumsum()[at] - counts[at]
            last = r.blocks.start[flat[at]] + r.blocks.size[flat[at]] - 1
            shared, own = r.blocks.data[last], ids[first]
            r.blocks.data[last] = own
            self._pool.release(shared, step)  # the copy reads it in this step
            copies = np.stack((groups[at], shared, own), axis=1).astype(np.int32)
            ids, counts = np.delete(ids, first), counts.copy()
            counts[at] -= 1
            kept_to.ravel()[at] -= 1
        r.blocks.extend(flat, counts, ids)
        end = r.end.take(rows, axis=0) + counts.reshape(need.shape)
        before = np.where(r.entering[rows, None], 0, r.first.take(rows, axis=0))
        first = np.maximum(r.first.take(rows, axis=0), r.first_blocks(starts))
        r.end[rows], r.first[rows] = end, first
        r.quiet_to[rows] = np.minimum((end * r.sizes).min(axis=1), r.drop_positions(first) + 1)
        if np.count_nonzero(r.shared[rows]):
            r.quiet_to[rows[r.shared[rows]]] = 0
        sent_from = np.where(r.entering[rows, None], first, kept_to)
        self._settle_later(rows[r.entering[rows]])
        r.entering[rows] = False
        drops, keeps, new = (first - before).ravel(), (sent_from - first).ravel(), (end - sent_from).ravel()
        told = ((drops > 0) | (new > 0)).nonzero()[0]
        sent = r.blocks.gather(flat[told], (sent_from - held).ravel()[told], new[told])
        numbers = (rows.repeat(r.groups)[told], groups[told], drops[told], keeps[told], new[told])
        return TableDeltas(*(n.astype(np.int32) for n in numbers), sent), copies, new_blocks

    def commit(self, step: int, rows: Ints = _NOBODY, tokens: Ints = _NOBODY) -> None:
        """The tokens of `step` are computed: they can be hit, and what no later query reads is given up.

        Args:
            step: The oldest step that is not committed.
            rows: Int64 [n], requests of the step that got a token, each once; those that were freed since
                are no part of it any more.
            tokens: [n], the token ids, appended to what each knows.

        Raises:
            IntegrityError: Steps are committed out of order.
            RequestError: Tokens of a request outside this step, or a request has computed tokens that it
                was never told; nothing has changed.
        """
        if step not in self._steps or step != next(iter(self._steps)):
            due = next(iter(self._steps), "none: no step is in flight")
            raise IntegrityError("steps are committed once each, in order", field="step", got=step, allowed=due)
        members, ends = self._steps[step]
        r = self.requests
        known, everyone = self._check_sampled(members, ends, rows, tokens)
        del self._steps[step]
        self._open = None
        r.tokens.append(rows, tokens)
        r.known[members] = known
        if not everyone:  # whoever got a token keeps its limit: one more is known, and one less in flight
            r.limit[members] -= 1
            r.limit[rows] += 1
        r.committed[members] = ends
        due_rows = members[ends > r.settled_to[members]]
        if len(due_rows):
            self._settle(due_rows, step)

    def _check_sampled(self, members: Ints, ends: Ints, rows: Ints, tokens: Ints) -> tuple[Ints, bool]:
        """How many tokens each member will know, and whether each gets one."""
        known = self.requests.known[members]
        everyone = len(rows) == len(members) and not np.count_nonzero(rows != members)
        if everyone:
            known = known + 1
        else:
            got = np.isin(members, rows)
            if np.count_nonzero(got) != len(rows):
                outside = [row for row in rows.tolist() if row not in set(members.tolist())]
                raise RequestError(
                    "tokens of a request that the step did not include, or twice of one",
                    field="rows",
                    got=outside or rows.tolist(),
                )
            known = known + got
        if np.count_nonzero(tokens >> 32):
            raise RequestError(
                "token ids must be integers of 32 bits", field="tokens", got=tokens.tolist(), allowed="0 .. 2**32 - 1"
            )
        unknown = (ends > known).nonzero()[0]
        if len(unknown):
            i = int(unknown[0])
            name = self.requests.name(int(members[i]))
            raise RequestError(
                f"request {name} has computed {ends[i]} tokens and knows {known[i]}",
                field="tokens",
                got=name,
                remedy="commit the sampled tokens of earlier steps",
            )
        return known, everyone

    def _settle(self, rows: Ints, step: int) -> None:
        """Offer the blocks that are full now to the prefix cache, and give up what no later query reads."""
        r = self.requests
        if self._prefix_caching:
            self._register(rows if self._epoch == 0 else rows[r.epoch[rows] == self._epoch])
        if r.dropping:
            self._trim(rows, step)
        self._settle_later(rows)

    def _settle_later(self, rows: Ints) -> None:
        """Note how far these requests can go on before there is anything to settle."""
        r = self.requests
        quiet = r.drop_positions(r.held(rows)) if r.dropping else np.full(len(rows), NEVER)
        if self._prefix_caching:
            full = np.where(self._stores, (r.offered.take(rows, axis=0) + 1) * r.sizes - 1, NEVER).min(axis=1)
            quiet = np.minimum(quiet, np.where(r.epoch[rows] == self._epoch, full, NEVER))
        r.settled_to[rows] = quiet

    def _register(self, rows: Ints) -> None:
        """Offer the blocks that are full and committed to the prefix cache; the first of equals stays."""
        r = self.requests
        offered = r.offered.take(rows, axis=0)
        counts = np.where(self._stores, r.committed[rows][:, None] // r.sizes - offered, 0)
        np.maximum(counts, 0, out=counts)
        self._hash(rows, r.committed[rows])
        r.offered[rows] = offered + counts
        held = r.held(rows)
        for group in range(r.groups):
            first, count = offered[:, group], counts[:, group]
            blocks = r.blocks.gather(rows * r.groups + group, first - held[:, group], count)
            digests = self._digests(rows, group, first, count)
            stored = self._cache.insert(group, digests, blocks.tolist())
            if len(stored):
                self._pool.set_cached(stored)
                self._version += 1
                if self._events.enabled:
                    self._tell_stored(rows, group, first, count, set(stored.tolist()))

    def _digests(self, rows: Ints, group: int, first: Ints, count: Ints) -> list[bytes]:
        """Of these requests' blocks ``first .. first + count - 1`` in a group."""
        chains, span = self.requests.chains, self._cache.spans[group]
        begin, end = ((first + 1) * span - 1).tolist(), ((first + count) * span).tolist()
        return [
            digest
            for row, i, j in zip(rows.tolist(), begin, end, strict=True)
            for digest in chains[row].digests[i:j:span]  # type: ignore[union-attr]
        ]

    def _tell_stored(self, rows: Ints, group: int, first: Ints, count: Ints, stored: set[int]) -> None:
        r, span, size = self.requests, self._cache.spans[group], self._rules[group].block_size
        held = r.held(rows)[:, group].tolist()
        for i, (row, begin, number) in enumerate(zip(rows.tolist(), first.tolist(), count.tolist(), strict=True)):
            digests, tokens = r.chain(row).digests, r.tokens.view(row)
            blocks = r.blocks.view(row * r.groups + group)
            for b in range(begin, begin + number):
                block = int(blocks[b - held[i]])
                if block in stored:
                    parent = digests[b * span - 1] if b else None
                    own = tuple(tokens[b * size : (b + 1) * size].tolist())
                    self._events.add(Stored(group, digests[(b + 1) * span - 1], block, parent, own))

    def _hash(self, rows: Ints, tokens: Ints) -> None:
        """Extend the chains of these requests over the whole runs of their first tokens."""
        r, run = self.requests, self._hasher.block_size
        done, runs = r.hashed[rows], tokens // run
        counts = np.maximum(runs - done, 0)
        data = r.tokens.gather(rows, done * run, counts * run).tobytes()
        self._hasher.extend([r.chains[row] for row in rows.tolist()], counts.tolist(), data)
        r.hashed[rows] = done + counts

    def _trim(self, rows: Ints, step: int) -> None:
        """Give up what no query from the committed end on will read; `step` was the last that did."""
        r = self.requests
        keep, flat = r.first_blocks(r.committed[rows]), r.flat(rows)
        gone = np.maximum(keep - r.held(rows), 0)
        idle = r.limit[rows] == r.known[rows]
        for group in (~self._stores).nonzero()[0].tolist():  # a begun block holds nothing that is read again
            gone[idle, group] = r.blocks.size[rows[idle] * r.groups + group]
            r.end[rows[idle], group] = keep[idle, group]
        reach = np.repeat(r.committed[rows].repeat(r.groups), gone.ravel())
        self._pool.release(r.blocks.drop_front(flat, gone.ravel()), step, reach)

    def retire(self, step: int) -> None:
        """All steps up to `step` are done on the device: the blocks that only they read become free."""
        if step > self._step:
            raise IntegrityError(
                "a step retires that was never allocated", field="step", got=step, allowed=f"<= {self._step}"
            )
        self._open = None
        self._pool.retire(step)

    @property
    def steps_in_flight(self) -> tuple[int, ...]:
        """The steps that were allocated and are not committed, oldest first."""
        return tuple(self._steps)

    def free(self, rows: Sequence[int] | Ints, *, forget: bool = False) -> None:
        """Let go of requests: finished, aborted or preempted, also with steps in flight.

        Their blocks wait until the last step that included them has retired; what was committed can
        still be hit.

        Args:
            rows: Requests that have begun.
            forget: What they computed, and what they hit, is wrong: nobody can hit it from now on.

        Raises:
            RequestError: An unknown or repeated row; nothing has changed.
        """
        r = self.requests
        leaving = np.asarray(rows, np.int64)
        r.check(leaving)
        self._open = None
        for row in leaving.tolist():
            self._hits.pop(row, None)
            self._explainer.freed(row)
            if forget:
                known = self._cache.known(r.chain(row).digests, r.offered[row].tolist())
                self._evicted(known)
                self._pool.uncache(known)
        for step, (members, ends) in self._steps.items():
            stay = ~np.isin(members, leaving)
            self._steps[step] = members[stay], ends[stay]
        blocks, owners = self._tail_first(leaving)
        self._pool.release(blocks, r.last_step[owners], r.committed[owners])
        r.close(leaving)

    def _tail_first(self, rows: Ints) -> tuple[Ints, Ints]:
        """All blocks of these requests, one request after the other, and the row of each.

        Each gives up its blocks by the tokens where they end, the last first, over all groups: in this order it
        loses its prefix from the tail, in every group alike.
        """
        r = self.requests
        flat = r.flat(rows)
        counts = r.blocks.size[flat]
        blocks = r.blocks.drop_front(flat, counts)
        owners = np.repeat(np.arange(len(rows)).repeat(r.groups), counts)
        if r.groups > 1:
            ends, sizes = r.end.take(rows, axis=0).ravel(), np.tile(r.sizes, len(rows))
            last = np.repeat(ends * sizes, counts) - spans(np.zeros_like(counts), counts) * np.repeat(sizes, counts)
            order = np.lexsort((-last, owners))
            blocks, owners = blocks[order], owners[order]
        return blocks, rows[owners]

    def table(self, row: int, group: int) -> tuple[int, list[int]]:
        """(first_block, ids): the table row of a request in a group; (0, []) before admission."""
        r = self.requests
        r.check(np.array([row]))
        if not 0 <= group < r.groups:
            raise RequestError("no such group", field="group", got=group, allowed=f"0 to {r.groups - 1}")
        if not r.admitted[row]:
            return 0, []
        held = int(r.held(np.array([row]))[0, group])
        first = max(int(r.first[row, group]), held)
        return first, r.blocks.view(row * r.groups + group)[first - held :].tolist()

    def num_computed(self, row: int) -> int:
        """Tokens given to steps so far, the prefix hit and steps in flight included."""
        self.requests.check(np.array([row]))
        return int(self.requests.computed[row])

    @property
    def free_blocks(self) -> int:
        """Blocks that can be handed out now."""
        return self._pool.num_free

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the blocks now: pending ones wait for a step, reusable ones are free."""
        return {
            "blocks_used": self._pool.num_used,
            "blocks_pending": self._pool.num_pending,
            "blocks_free": self._pool.num_free,
            "blocks_reusable": self._pool.num_reusable,
            "blocks_total": self._pool.num_blocks - 1,
            "blocks_cached": len(self._cache),
            "peak_blocks": self._peak,
            "prefix_hit_tokens": self._hit_tokens,
            "prefix_query_tokens": self._query_tokens,
            "copied_blocks": self._copied,
            "evictions": self._pool.evictions,
            "requests": len(self.requests),
            "steps": self._step,
        }

    def take_events(self) -> list[Event]:
        """Events since the last call, oldest first; `ConfigError` unless they are collected."""
        return self._events.drain()

    def explain_miss(self, name: str) -> Miss:
        """Why the prefix hit of a request, when it was admitted, was no longer."""
        return self._explainer.miss(name)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content (new weights, say); requests that run now will not enter it again."""
        self._open = None
        self._pool.uncache(self._cache.clear())
        self._epoch += 1
        self._explainer.epoch = self._epoch
        self._version += 1
        self._events.add(Cleared())

    def check_integrity(self) -> None:
        """Prove that every id is in one state, counted right, and owned by one group; O(pool)."""
        self._pool.check_integrity(check_rows(self.requests, self._cache))

    def _find_hit(self, row: int) -> Hit:
        memo = self._hits.get(row)
        if memo is not None and memo[0] == self._version:
            return memo[1]
        # The last token must be computed, for its logits.
        limit = int(self.requests.known[row]) - 1 if self._prefix_caching else 0
        digests = self.requests.chain(row).digests
        if limit // self._hasher.block_size > len(digests):
            self._hash(np.array([row]), np.array([limit]))
        hit = self._cache.find(digests, limit)
        self._hits[row] = self._version, hit
        return hit

    def _evicted(self, blocks: Ints) -> None:
        for block, (group, digest) in zip(blocks.tolist(), self._cache.remove(blocks.tolist()), strict=True):
            if self._events.enabled:
                self._events.add(Removed(group, digest, block))
        self._version += len(blocks)
