"""`KVCacheManager`: what a scheduler calls, one call a step for all requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcore.errors import IntegrityError, RequestError
from kvcore.manage.allocation import StepAllocation, TableDeltas
from kvcore.manage.explain.explainer import Explainer
from kvcore.manage.group_rule import rules_of
from kvcore.manage.large_pages.large_page_pool import pool_of
from kvcore.manage.policies.eviction import LRU, EvictionPolicy
from kvcore.manage.prefix.block_hash import Extra, check_extras, token_array
from kvcore.manage.prefix.control import PrefixControl
from kvcore.manage.prefix.prefix_cache import Hit
from kvcore.manage.prefix.prefixes import Pins, Prefixes
from kvcore.manage.ragged import Ints
from kvcore.manage.requests import Origin, Requests
from kvcore.manage.step import Step
from kvcore.manage.steps_in_flight import StepsInFlight
from kvcore.manage.watch.dead_blocks import DeadBlocks
from kvcore.manage.watch.events import EventLog
from kvcore.manage.watch.integrity import check_rows
from kvcore.plan.config import KVCacheConfig
from kvcore.settings.cache import EXPLAIN_HISTORY

_NOBODY: Ints = np.zeros(0, np.int64)


class KVCacheManager(PrefixControl):
    """Owns every block id of one rank; never sees a tensor.

    A request lives under a number, its row: ``begin``, then any number of ``allocate`` and ``commit`` pairs, then
    ``free``. Up to any number of steps may be in flight between the two; they are committed in order. An id that
    was given up is handed out again only after the last step that may read it was retired.

    Args:
        config: The plan of this rank.
        prefix_caching: Whether prefixes are reused.
        partial_reuse: Whether a hit may end inside a block, which is then copied; else where blocks of all groups end.
        hash_name: ``sha256`` or ``xxh3-128``.
        namespace: Fingerprint of model and layout, where the digest chains start.
        eviction: Class of the eviction policy; least recently used when None.
        explain: Keep what `explain` needs.
        explain_history: Forgotten blocks that it remembers.
        events: Collect events for `take_events`; they pile up until taken.
        track_dead: Report in each step the blocks whose content died, so that it can be poisoned.

    Attributes:
        requests: What is known of each row; read only.

    Raises:
        NotBuiltError: The config needs a retention that is not built yet.
        ConfigError: The hash is unknown or not installed.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        *,
        prefix_caching: bool = True,
        partial_reuse: bool = False,
        hash_name: str = "sha256",
        namespace: bytes = b"",
        eviction: type[EvictionPolicy] | None = None,
        explain: bool = False,
        explain_history: int = EXPLAIN_HISTORY,
        events: bool = False,
        track_dead: bool = False,
    ) -> None:
        self._rules = rules_of(config)
        self.requests = Requests(self._rules)
        self._events = EventLog(collect=events)
        self._pool = pool_of(
            config,
            eviction or LRU,
            on_evict=lambda blocks: self._prefixes.remove(blocks),
            on_death=lambda blocks: self._dead.died(blocks),
        )
        self._prefixes = Prefixes(
            self.requests,
            self._pool.num_blocks,
            hash_name=hash_name,
            namespace=namespace,
            events=self._events,
            enabled=prefix_caching,
            partial=partial_reuse,
        )
        self._dead = DeadBlocks(self._pool, enabled=track_dead)
        self._pins = Pins(self._pool)
        known = self.requests, self._prefixes.cache, self._pool, explain_history
        self._explainer = Explainer(*known, enabled=prefix_caching, unit=self._prefixes.unit) if explain else None
        if self._explainer is not None and self._explainer.enabled:
            self._events.listeners.append(self._explainer.see)
        self._open: Step | None = None  # begun, and nothing changed since
        self._flight, self._given_up = StepsInFlight(), list[Ints]()  # rows that gave up blocks since the last step
        self._step = 0
        self._peak = self._hit_tokens = self._query_tokens = self._copied = 0

    # ---- a request enters

    def begin(
        self, token_ids: Sequence[int] | Ints, *, salt: str = "", extras: Sequence[Extra] = (), name: str = ""
    ) -> int:
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
        chain = self._prefixes.chain(salt, checked)
        return self.requests.open(Origin(name, len(tokens), salt, checked), chain, tokens)

    def extend(self, row: int, token_ids: Sequence[int]) -> None:
        """Tell a request more tokens, to be computed: the next turn of a talk, or the next piece of a prompt.

        Args:
            row: A request with no step in flight, admitted or not.
            token_ids: What follows the tokens that it knows.

        Raises:
            RequestError: An unknown request, malformed tokens, or a step in flight, whose sampled token comes first;
                nothing has changed.
        """
        r = self.requests
        rows, tokens = np.array([row]), token_array(token_ids)
        r.check(rows)
        if r.limit[row] != r.known[row]:
            raise RequestError(
                "a step of this request is in flight, and may still tell it a token",
                field="row",
                got=r.name(row),
                remedy="commit its steps in flight first",
            )
        self._open = None
        self._prefixes.forget(row)  # one more token may let one more block be hit
        r.tokens.extend(rows, np.array([len(tokens)]), tokens)
        r.known[row] += len(tokens)
        r.limit[row] = r.known[row]

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
        r.check_one(parent)
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
        self._flight.fork(parent, children)
        return children

    def begin_step(self) -> Step:
        """An empty step, to be filled by `Step.add` and `Step.try_add` and then given to `allocate`.

        It is void once blocks change hands otherwise: by another step, a commit, a retirement, an extension, a fork,
        a free, or a reset.
        """
        self._open = Step(self.requests, self._pool, self._prefixes.find, self._prefixes.find_whole)
        return self._open

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
        rows, starts, ends, limits, look = step.whole()
        r = self.requests
        r.computed[rows] = ends
        r.limit[rows] = limits + 1
        r.last_step[rows] = number
        self._flight.add(number, rows, ends)
        deltas, copies, new_blocks = step.extend(look, number)
        if self._given_up:
            deltas = self._tell_absent(number, deltas)
        if self._explainer is not None and look is not None:
            self._explainer.handed_out(new_blocks[:, 1], np.repeat(look.rows, look.need.sum(axis=1)), number)
        self._copied += len(copies)
        self._peak = max(self._peak, self._pool.num_used)
        dead, freed = self._dead.drain(new_blocks), self._dead.drain_released()
        given = StepAllocation(number, rows, starts, ends, deltas, copies, new_blocks, cached, dead, freed)
        return given if self._pool.first is None else given.as_ids(self._pool.first)

    def _tell_absent(self, number: int, deltas: TableDeltas) -> TableDeltas:
        """Who gave up blocks and is not in the step loses them in the worker's tables too: others may get them now."""
        r = self.requests
        rows = np.concatenate(self._given_up)
        self._given_up.clear()
        absent = rows[(r.last_step[rows] != number) & r.admitted[rows] & ~r.entering[rows]]
        return deltas.and_then(r.give_up(np.unique(absent))) if len(absent) else deltas

    def _admit(self, row: int, hit: Hit) -> int:
        r = self.requests
        if self._explainer is not None:
            self._explainer.admitted(row, hit.tokens)
        for group, (first, blocks) in enumerate(zip(hit.first_blocks, hit.blocks, strict=True)):
            if blocks:
                found = np.array(blocks, np.int64)
                self._pool.share(found)
                r.blocks.assign(row * r.groups + group, found)
            r.first[row, group] = first
            r.end[row, group] = first + len(blocks)
            # A block that is begun in its middle, where a chunk begins, never holds what its digest stands for.
            whole, rest = divmod(hit.tokens, int(r.sizes[group]))
            r.offered[row, group] = whole + (rest > 0 and group not in hit.copied)
        r.epoch[row] = self._prefixes.epoch
        r.admitted[row] = r.entering[row] = True
        r.computed[row] = r.committed[row] = hit.tokens
        self._prefixes.forget(row)
        self._hit_tokens += hit.tokens
        self._query_tokens += int(r.known[row])
        return hit.tokens

    @property
    def large_pages(self) -> bool:
        """Whether free memory can be out of reach because it is scattered over large pages."""
        return self._pool.first is not None

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
        members, ends = self._flight.due(step)
        r = self.requests
        known, everyone = r.check_sampled(members, ends, rows, tokens)
        self._flight.done(step)
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

    def _settle(self, rows: Ints, step: int) -> None:
        """Offer the blocks that are full now to the prefix cache, and give up what no later query reads."""
        r = self.requests
        self._prefixes.register(rows, self._pool)
        if r.dropping:
            blocks, owners = r.take_unread(rows)
            if len(owners):
                self._given_up.append(owners)
            self._pool.release(blocks, step, self._readers(owners, rows)[1])
        # How far these can go on before there is anything to settle again.
        quiet = self._prefixes.next_full(rows)
        r.settled_to[rows] = np.minimum(quiet, r.drop_positions(r.held(rows))) if r.dropping else quiet

    def retire(self, step: int) -> None:
        """All steps up to `step` are done on the device: the blocks that only they read become free."""
        if step > self._step:
            raise IntegrityError("no such step was allocated", field="step", got=step, allowed=f"<= {self._step}")
        self._open = None
        self._pool.retire(step)

    @property
    def steps_in_flight(self) -> tuple[int, ...]:
        """The steps that were allocated and are not committed, oldest first."""
        return self._flight.numbers

    def members(self, step: int) -> Ints:
        """The rows of a step that is not committed, without those of requests that were freed since."""
        return self._flight.of(step)[0]

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
            self._prefixes.forget(row)
            if forget:
                known = self._prefixes.known(row)
                self._prefixes.remove(known)
                self._pool.uncache(known)
                if self._explainer is not None:
                    self._explainer.withdrawn(self._step + 1)
            if self._explainer is not None:
                self._explainer.freed(row)
        self._flight.leave(leaving)
        blocks, owners = r.take_all(leaving)
        try:
            self._pool.release(blocks, *self._readers(owners, leaving), distinct=len(leaving) == 1)
        finally:  # an eviction policy is anybody's code
            r.close(leaving)

    def _readers(self, owners: Ints, rows: Ints) -> tuple[int | Ints, int | Ints]:
        """Last readers and reach of blocks by the rows that own them; 0 where nobody will ask."""
        r = self.requests
        late = r.last_step[rows].max(initial=0) > self._pool.retired
        return r.last_step[owners] if late else 0, r.committed[owners] if self._pool.minds_reach else 0

    def table(self, row: int, group: int) -> tuple[int, list[int]]:
        """(first_block, ids): the table row of a request in a group; (0, []) before admission."""
        self.requests.check_one(row)
        if not 0 <= group < len(self._rules):
            raise RequestError("no such group", field="group", got=group, allowed=f"0 to {len(self._rules) - 1}")
        first_block, blocks = self.requests.table(row, group)
        if self._pool.first is not None:
            blocks = [block - int(self._pool.first[group]) for block in blocks]
        return first_block, blocks

    def stats(self) -> dict[str, int]:
        """Counters since the start, and the blocks now: pending ones wait for a step, reusable ones are free.

        Used, free, reusable, total and peak are large pages where the placement is `packed`.
        """
        return {
            "blocks_used": self._pool.num_used,
            "blocks_pending": self._pool.num_pending,
            "blocks_free": self._pool.num_free,
            "blocks_reusable": self._pool.num_reusable,
            "blocks_total": self._pool.capacity,
            "blocks_cached": len(self._prefixes.cache),
            "peak_blocks": self._peak,
            "prefix_hit_tokens": self._hit_tokens,
            "prefix_query_tokens": self._query_tokens,
            "copied_blocks": self._copied,
            "evictions": self._pool.evictions,
            "requests": len(self.requests),
            "steps": self._step,
        }

    def check_integrity(self) -> None:
        """Prove that every id is in one state, counted right, and owned by one group; O(pool)."""
        self._pool.check_integrity(self._pins.count(check_rows(self.requests, self._prefixes.cache)))
