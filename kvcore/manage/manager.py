"""`KVCacheManager`: what a scheduler calls, one call a step for all requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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
from kvcore.manage.request import BlockRow, RequestState
from kvcore.manage.step import ScheduledRequest, StepAllocation
from kvcore.manage.step_plan import StepPlan, check_sampled
from kvcore.plan.config import KVCacheConfig


class KVCacheManager:
    """Owns every block id of one rank; never sees a tensor.

    A request lives through ``begin``, then any number of ``allocate`` and ``commit`` pairs, then ``free``.
    Up to any number of steps may be in flight between the two; they are committed in order. An id that
    was given up is handed out again only after the last step that may read it was retired.

    Args:
        config: The plan of this rank.
        prefix_caching: Whether prefixes are reused.
        hash_name: ``sha256`` or ``xxh3``.
        namespace: Fingerprint of model and layout, where the digest chains start.
        eviction: Class of the eviction policy; least recently used when None.
        explain_history: Requests to remember, so that `explain_miss` can compare.
        events: Collect events for `take_events`; they pile up until taken.
        track_dead: Report in each step the blocks whose content died, so that it can be poisoned.

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
        self._prefix_caching = prefix_caching
        self._hasher = BlockHasher(hash_block_size(self._rules), name=hash_name, namespace=namespace)
        self._cache = PrefixCache(self._rules, config.num_blocks)
        self._dead = DeadBlocks(config.num_blocks, enabled=track_dead)
        self._pool = BlockPool(
            config.num_blocks, policy=eviction or LRU, on_evict=self._evicted, on_death=self._dead.died
        )
        self._events = EventLog(enabled=events)
        self._explainer = Explainer(self._rules, self._cache, explain_history, enabled=prefix_caching)
        self._requests: dict[str, RequestState] = {}
        self._open: StepPlan | None = None  # begun, and nothing changed since
        self._steps: dict[int, list[tuple[RequestState, int]]] = {}  # not committed: (request, end)
        self._step = 0
        self._epoch = 0
        self._version = 0  # of the prefix index
        self._peak = self._hit_tokens = self._query_tokens = self._copied = 0

    # ---- a request enters

    def begin(self, request_id: str, token_ids: Sequence[int], *, salt: str = "", extras: Sequence[Extra] = ()) -> None:
        """Register a request; it takes no blocks before its first step.

        Args:
            request_id: Any name that is not in use.
            token_ids: The prompt (and what was generated before a preemption), at least one token.
            salt: Only requests of equal salt share prefixes.
            extras: `Adapter` and `Multimodal` facts that the content depends on.

        Raises:
            RequestError: The name is in use, or tokens or extras are malformed.
        """
        if request_id in self._requests:
            raise RequestError("this request has begun already", field="request_id", got=request_id)
        tokens = token_array(token_ids)
        if not tokens:
            raise RequestError("a request needs at least one token", field="token_ids", got=0, allowed=">= 1")
        checked = check_extras(extras)
        root = self._hasher.root(salt, checked)
        self._requests[request_id] = RequestState(request_id, tokens, root, salt, checked)

    def fork(self, parent_id: str, child_ids: Sequence[str]) -> None:
        """Make children that share all blocks of the parent, and are part of its steps in flight.

        Whoever first writes into a shared, partly filled block copies it at its next `allocate`. To sample
        n continuations of one prompt, fork between `allocate` and `commit` of the step that ends the
        prompt, and commit a token for each.

        Raises:
            RequestError: An unknown parent, a name in use, or a parent with a step in flight that
                computes a token not known yet (parent and child would share that token).
        """
        parent = self._known(parent_id)
        taken = [c for i, c in enumerate(child_ids) if c in self._requests or c in child_ids[:i]]
        if taken:
            raise RequestError("a child's name is in use", field="child_ids", got=taken)
        if parent.computed > len(parent.tokens):
            raise RequestError(
                "the parent already computes a token that was not committed",
                field="parent_id",
                got=parent_id,
                remedy="commit its steps in flight first",
            )
        self._open = None
        for child_id in child_ids:
            child = parent.fork(child_id)
            self._requests[child_id] = child
            for row in child.rows:
                self._pool.share(row.ids)
            for members in self._steps.values():
                members.extend([(child, end) for request, end in members if request is parent])

    # ---- a step

    def lookup(self, request_ids: Sequence[str]) -> list[int]:
        """Tokens that each request, not yet admitted, would get from the prefix cache now."""
        requests = [self._known(r) for r in request_ids]
        for request in requests:
            if request.rows:
                raise RequestError("this request is admitted already", field="request_id", got=request.request_id)
        return [self._find_hit(request).tokens for request in requests]

    def begin_step(self) -> StepPlan:
        """An empty step, to be filled by `try_add` and then given to `allocate`.

        It is void once blocks change hands otherwise: by another step, a commit, a retirement, a fork, a free,
        or a reset.
        """
        self._open = StepPlan(self._requests, self._rules, self._pool, self._find_hit)
        return self._open

    def blocks_short(self, asks: Sequence[ScheduledRequest]) -> int:
        """0 when `allocate(asks)` would succeed now, else how many free blocks are missing."""
        return self._plan(asks).short

    def allocate(self, asks: StepPlan | Sequence[ScheduledRequest]) -> StepAllocation:
        """Give a whole step its blocks, or change nothing.

        A request that is not admitted yet is, with the longest prefix that the cache holds now; its
        `num_scheduled` counts tokens beyond it. The content that a step computes can be hit only after
        the step is committed.

        Args:
            asks: What `begin_step` began, or all asks at once.

        Raises:
            OutOfBlocksError: Too few free blocks; nothing has changed.
            RequestError, NotBuiltError: An ask is malformed; nothing has changed.
            IntegrityError: The step is void, because blocks changed hands since it was begun.
        """
        plan = asks if isinstance(asks, StepPlan) else self._plan(asks)
        plan.require(void=plan is asks and plan is not self._open)
        self._open = None
        self._step = step = self._step + 1
        # Hits first: a block that is held can no longer be evicted by the rest of the step.
        cached = {p.request.request_id: self._admit(p.request, p.hit) for p in plan.parts if p.hit is not None}
        deltas, copies, new_blocks = plan.extend(step)
        self._steps[step] = [(p.request, p.end) for p in plan.parts]
        self._copied += len(copies)
        self._peak = max(self._peak, self._pool.num_used)
        return StepAllocation(step, deltas, copies, new_blocks, cached, self._dead.drain(new_blocks))

    def commit(self, step: int, new_tokens: Mapping[str, Sequence[int]]) -> None:
        """The tokens of `step` are computed: they can be hit, and what no later query reads is given up.

        Args:
            step: The oldest step that is not committed.
            new_tokens: Sampled token ids by request, appended to what it knows; requests that were freed
                since are passed over.

        Raises:
            IntegrityError: Steps are committed out of order.
            RequestError: Tokens of a request outside this step, or a request has computed tokens that it
                was never told; nothing has changed.
        """
        if step not in self._steps or step != next(iter(self._steps)):
            due = next(iter(self._steps), "none: no step is in flight")
            raise IntegrityError("steps are committed once each, in order", field="step", got=step, allowed=due)
        members = self._steps[step]
        sampled = check_sampled(members, new_tokens)
        del self._steps[step]
        self._open = None
        for request, end in members:
            if request.alive:
                tokens = sampled.get(request.request_id)
                if tokens:
                    request.tokens.extend(tokens)
                request.in_flight -= 1
                run = self._hasher.block_size
                filled = end // run > request.committed // run  # a block may have become full
                request.committed = end
                if filled and self._prefix_caching and request.epoch == self._epoch:
                    self._register(request)
                self._trim(request, step)

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

    def free(self, request_ids: Sequence[str], *, forget: bool = False) -> None:
        """Let go of requests: finished, aborted or preempted, also with steps in flight.

        Their blocks wait until the last step that included them has retired; what was committed can
        still be hit. A preempted request may `begin` again under its name.

        Args:
            request_ids: Requests that have begun.
            forget: What they computed, and what they hit, is wrong: nobody can hit it from now on.

        Raises:
            RequestError: An unknown or repeated name; nothing has changed.
        """
        requests = [self._known(r) for r in request_ids]
        if len(set(request_ids)) != len(request_ids):
            raise RequestError("a request is freed twice", field="request_ids", got=list(request_ids))
        self._open = None
        for request in requests:
            del self._requests[request.request_id]
            request.alive = False
            if forget:
                for block in self._cache.known(request.digests, [row.registered for row in request.rows]):
                    self._evicted(block)
                    self._pool.uncache([block])
            self._pool.release(request.tail_first(self._rules), request.last_step)
            request.rows = []
            request.hit_memo = None

    def table(self, request_id: str, group: int) -> tuple[int, list[int]]:
        """(first_block, ids): the row of a request in a group; (0, []) before admission."""
        request = self._known(request_id)
        if not 0 <= group < len(self._rules):
            raise RequestError("no such group", field="group", got=group, allowed=f"0 to {len(self._rules) - 1}")
        return (request.rows[group].first, request.rows[group].visible()) if request.rows else (0, [])

    def num_computed(self, request_id: str) -> int:
        """Tokens given to steps so far, the prefix hit and steps in flight included."""
        return self._known(request_id).computed

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
            "requests": len(self._requests),
            "steps": self._step,
        }

    def take_events(self) -> list[Event]:
        """Events since the last call, oldest first; `ConfigError` unless they are collected."""
        return self._events.drain()

    def explain_miss(self, request_id: str) -> Miss:
        """Why the prefix hit of a request, when it was admitted, was no longer."""
        return self._explainer.miss(request_id)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content (new weights, say); requests that run now will not enter it again."""
        self._open = None
        self._pool.uncache(self._cache.clear())
        self._epoch += 1
        self._version += 1
        self._events.add(Cleared())

    def check_integrity(self) -> None:
        """Prove that every id is in one state, counted right, and owned by one group; O(pool)."""
        self._pool.check_integrity(check_rows(self._requests.values(), self._rules, self._cache))

    # ---- inside

    def _known(self, request_id: str) -> RequestState:
        request = self._requests.get(request_id)
        if request is None:
            raise RequestError("unknown request", field="request_id", got=request_id, remedy="call begin() first")
        return request

    def _find_hit(self, request: RequestState) -> Hit:
        memo = request.hit_memo
        if memo is not None and memo[0] == self._version:
            return memo[1]
        # The last token must be computed, for its logits.
        limit = len(request.tokens) - 1 if self._prefix_caching else 0
        request.hash_to(self._hasher, limit)
        hit = self._cache.find(request.digests, limit)
        request.hit_memo = (self._version, hit)
        return hit

    def _plan(self, asks: Sequence[ScheduledRequest]) -> StepPlan:
        plan = StepPlan(self._requests, self._rules, self._pool, self._find_hit)
        for ask in asks:
            plan.add(ask)
        return plan

    def _admit(self, request: RequestState, hit: Hit) -> int:
        request.epoch = self._epoch
        self._explainer.admitted(request, hit.tokens)
        for blocks in hit.blocks:
            self._pool.share(blocks)
        request.rows = [
            BlockRow(first, blocks, registered=first + len(blocks))
            for first, blocks in zip(hit.first_blocks, hit.blocks, strict=True)
        ]
        request.computed = request.committed = hit.tokens
        request.hit_memo = None
        self._hit_tokens += hit.tokens
        self._query_tokens += len(request.tokens)
        return hit.tokens

    def _register(self, request: RequestState) -> None:
        """Offer the blocks that are full and committed to the prefix cache; the first of equals stays."""
        request.hash_to(self._hasher, request.committed)
        for rule, row, span in zip(self._rules, request.rows, self._cache.spans, strict=True):
            full = request.committed // rule.block_size
            if rule.stores_nothing:
                continue
            for b in range(row.registered, full):
                block, digest = row.ids[b - row.held], request.digests[(b + 1) * span - 1]
                if self._cache.insert(rule.index, digest, block):
                    self._pool.set_cached(block)
                    self._version += 1
                    if self._events.enabled:
                        parent = request.digests[b * span - 1] if b else None
                        own = request.tokens[b * rule.block_size : (b + 1) * rule.block_size]
                        self._events.add(Stored(rule.index, digest, block, parent, tuple(own)))
            row.registered = max(row.registered, full)

    def _trim(self, request: RequestState, step: int) -> None:
        """Give up what no query from the committed end on will read; `step` was the last that did."""
        for rule, row in zip(self._rules, request.rows, strict=True):
            if not rule.drops:
                continue
            gone = row.cut_front(rule.first_block(request.committed))
            if rule.stores_nothing and request.in_flight == 0:
                gone = [*reversed(row.ids), *gone]  # a begun block holds nothing that is read again
                row.ids.clear()
            self._pool.release(gone, step)

    def _evicted(self, block: int) -> None:
        group, digest = self._cache.remove(block)
        self._version += 1
        self._events.add(Removed(group, digest, block))
