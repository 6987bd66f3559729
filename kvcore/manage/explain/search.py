"""`Search`: for each token of one prompt, whether it was reused, and if not, why."""

from __future__ import annotations

from kvcore.manage.explain.content_tree import ContentTree
from kvcore.manage.explain.eviction_log import EvictionLog, Forgotten
from kvcore.manage.explain.explanation import Explanation, Missed, Reason
from kvcore.manage.group_rule import GroupRule
from kvcore.manage.prefix.prefix_cache import PrefixCache
from kvcore.manage.requests import Requests

Conditions = tuple[str, tuple[bytes, ...]]  # salt and adapters


class Search:
    """Goes from the end of the hit to the end of the prompt; each stage takes over where the one before had no reason.

    1. Groups that keep every token would serve more: a group that drops tokens has vetoed it.
    2. Blocks that were known, and were forgotten; and those behind them, which cannot be reached without them.
    3. Blocks that a running request computes at this moment.
    4. What is cached below the last known block: under other conditions, or with another token.
    5. Nothing: nobody had computed them. And what no hit can cover: where hits are whole blocks the rest of one, and
       always the last token.

    Args:
        requests: All requests; row `row` is the one that is admitted.
        cache: The prefix index.
        tree: What is cached, by tokens.
        log: What was forgotten.
        conditions: What the marks of the tree stand for.
        row: The request.
        unit: A hit ends on a multiple of this.
    """

    def __init__(
        self,
        requests: Requests,
        cache: PrefixCache,
        tree: ContentTree,
        log: EvictionLog,
        conditions: list[Conditions],
        row: int,
        unit: int,
    ) -> None:
        self._requests, self._cache, self._tree, self._log = requests, cache, tree, log
        self._conditions, self._row = conditions, row
        self._keeping = [r for r in requests.rules if not r.drops] or list(requests.rules)
        self._anchor = self._keeping[0]
        self._tokens = requests.tokens.view(row)
        self._digests = requests.chain(row).digests
        self._missed: list[Missed] = []
        self._length = len(self._tokens)
        self._possible = (self._length - 1) // unit * unit

    def disabled(self) -> Explanation:
        """Nothing is ever reused."""
        return Explanation(self._length, 0, (Missed("disabled", 0, self._length),))

    def explain(self, hit: int) -> Explanation:
        """The explanation of a hit of `hit` tokens."""
        at = self._vetoed(hit)
        at = self._forgotten(at)
        at = self._being_computed(at)
        self._unlike(at)
        if self._possible < self._length:
            self._miss(Missed("granularity", max(hit, self._possible), self._length - max(hit, self._possible)))
        return Explanation(self._length, hit, tuple(self._missed))

    def _miss(self, missed: Missed) -> None:
        """Keep it; what goes on with the same reason makes the one before it longer."""
        last = self._missed[-1] if self._missed else None
        if last is not None and (last.reason, last.group) == (missed.reason, missed.group):
            self._missed[-1] = last._replace(tokens=last.tokens + missed.tokens)
        else:
            self._missed.append(missed)

    def _digest(self, rule: GroupRule, block: int) -> bytes:
        return self._digests[(block + 1) * self._cache.spans[rule.index] - 1]

    def _known(self, rule: GroupRule, block: int) -> bool:
        return self._cache.get(rule.index, self._digest(rule, block)) is not None

    def _vetoed(self, hit: int) -> int:
        """How far the groups that keep every token go; what lies between is a veto of another group."""
        if self._keeping[0].drops:
            return hit
        reach = min(self._contiguous(rule, hit) for rule in self._keeping) // self._cache.unit * self._cache.unit
        if reach <= hit:
            return hit
        for rule in self._requests.rules:
            for block in range(rule.first_block(reach), reach // rule.block_size) if rule.drops else ():
                if not self._known(rule, block):
                    entry = self._log.find(rule.index, [self._digest(rule, block)])[0]
                    self._miss(_of("window", hit, reach - hit, entry)._replace(group=rule.index))
                    return reach
        return hit

    def _contiguous(self, rule: GroupRule, start: int) -> int:
        block = start // rule.block_size
        while (block + 1) * rule.block_size <= self._possible and self._known(rule, block):
            block += 1
        return block * rule.block_size

    def _forgotten(self, at: int) -> int:
        """Blocks that were known once, as far as they follow each other."""
        unit = self._cache.unit
        while at < self._possible:
            lacking = [
                (rule, block)
                for rule in self._keeping
                for block in range(at // rule.block_size, min(at + unit, self._possible) // rule.block_size)
                if not self._known(rule, block)
            ]
            step = min(unit - at % unit, self._possible - at)
            if lacking:
                entries = [self._log.find(rule.index, [self._digest(rule, block)])[0] for rule, block in lacking]
                entry = next((e for e in entries if e is not None), None)
                if entry is None:
                    return at
                self._miss(_of(entry.cause, at, step, entry))
            elif self._missed:  # known, and not to be reached
                self._missed[-1] = self._missed[-1]._replace(tokens=self._missed[-1].tokens + step)
            else:
                return at
            at += step
        return at

    def _being_computed(self, at: int) -> int:
        """As far as a running request has the same blocks ahead of it."""
        span, size = self._cache.spans[self._anchor.index], self._anchor.block_size
        first, last = at // size, self._possible // size
        mine = self._digests[(first + 1) * span - 1 : last * span : span]
        if not mine:
            return at
        best, whose = 0, -1
        for row in self._requests.rows():
            if row != self._row and self._requests.admitted[row]:
                theirs = self._requests.chain(row).digests[(first + 1) * span - 1 : last * span : span]
                alike = next((i for i, (a, b) in enumerate(zip(mine, theirs, strict=False)) if a != b), len(theirs))
                if alike > best:
                    best, whose = min(alike, len(mine)), row
        if not best:
            return at
        end = (first + best) * size
        self._miss(Missed("not_computed", at, end - at, request=self._requests.name(whose)))
        return end

    def _unlike(self, at: int) -> None:
        """What is cached below the last block that is known, and how it goes on."""
        size = self._anchor.block_size
        block, reason = at // size, None
        root = self._tree.root
        node = root if not block else self._cache.get(self._anchor.index, self._digest(self._anchor, block - 1))
        while at < self._possible:
            ours = self._tokens[block * size : min((block + 1) * size, self._possible)]
            nearest, common = self._tree.closest(node, ours) if node is not None else ([], 0)
            start = block * size
            if not nearest or (not common and node == root) or start + common < at:
                self._miss(Missed("never_cached", at, self._possible - at))
                return
            if common < len(ours):
                if start + common > at:
                    self._miss(Missed("granularity", at, start + common - at))
                    at = start + common
                theirs = int(self._tree.tokens(nearest[0])[common])
                self._miss(Missed("token", at, self._possible - at, ours=int(ours[common]), theirs=theirs))
                return
            nearest.sort(key=self._likeness, reverse=True)
            reason = reason or self._condition(nearest[0], node == root)
            self._miss(Missed(reason, at, start + len(ours) - at))
            node, block, at = nearest[0], block + 1, start + len(ours)

    def _likeness(self, block: int) -> tuple[bool, bool]:
        """Whether salt and adapters of a cached block are those of the request."""
        salt, adapters = self._conditions[self._tree.mark(block)]
        origin = self._requests.origin(self._row)
        return salt == origin.salt, adapters == origin.adapters

    def _condition(self, block: int, begins: bool) -> Reason:
        """What differs from a block of equal tokens whose key is another one."""
        salt, adapters = self._likeness(block)
        if begins and not salt:
            return "salt"
        return "adapter" if begins and not adapters else "item"


def _of(reason: Reason, start: int, tokens: int, entry: Forgotten | None) -> Missed:
    if entry is None:
        return Missed(reason, start, tokens)
    return Missed(reason, start, tokens, step=entry.step, request=entry.request)
