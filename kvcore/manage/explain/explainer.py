"""`Explainer`: knows what is cached by its tokens, and what was forgotten last, and explains admissions by it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvcore.errors import ConfigError, RequestError
from kvcore.manage.block_pool import BlockPool
from kvcore.manage.explain.content_tree import ContentTree
from kvcore.manage.explain.eviction_log import Cause, EvictionLog
from kvcore.manage.explain.explanation import Explanation
from kvcore.manage.explain.search import Conditions, Search
from kvcore.manage.group_rule import STATE_TOKENS
from kvcore.manage.prefix.prefix_cache import PrefixCache
from kvcore.manage.ragged import Ints
from kvcore.manage.requests import Requests
from kvcore.manage.watch.events import Event, Removed, Stored


class Explainer:
    """Follows the events of the cache. Tokens are kept for the first group that keeps everything, else for the first.

    Args:
        requests: The requests, only read.
        cache: The prefix index, only read.
        pool: The blocks, only read.
        history: How many forgotten blocks are remembered.
        enabled: Whether prefixes are cached at all.
        unit: A hit ends on a multiple of this.

    Attributes:
        enabled: Whether a prompt can be reused; with states in the model none can.

    Raises:
        ConfigError: `history` is not positive.
    """

    def __init__(
        self, requests: Requests, cache: PrefixCache, pool: BlockPool, history: int, *, enabled: bool, unit: int
    ) -> None:
        if history < 1:
            raise ConfigError(
                "explain_history is not positive", field="cache.explain_history", got=history, allowed=">= 1"
            )
        self._requests, self._cache, self._unit = requests, cache, unit
        self.enabled = enabled and cache.unit < STATE_TOKENS
        anchor = next((r for r in requests.rules if not r.drops), requests.rules[0])
        self._anchor = anchor.index
        self._pool = pool
        first, end = (0, pool.num_blocks) if pool.first is None else pool.first[anchor.index :][:2].tolist()
        self._tree = ContentTree(end - first if self.enabled else 0, anchor.block_size, root=first)
        self._log = EvictionLog(history)
        self._numbers: dict[Conditions, int] = {}
        self._gone: list[Removed] = []  # since the last step
        self._found: dict[int, Explanation] = {}

    def of(self, row: int) -> Explanation:
        """What `admitted` found for a request.

        Raises:
            RequestError: It has not been admitted.
        """
        found = self._found.get(row)
        if found is None:
            raise RequestError("this request was not admitted", field="row", got=row)
        return found

    # ---- what happens to the cache

    def see(self, event: Event) -> None:
        """Content became known, or was forgotten."""
        if isinstance(event, Stored):
            if event.group == self._anchor:
                parent = self._tree.root if event.parent is None else self._cache.get(event.group, event.parent)
                if parent is not None:
                    self._tree.add(event.block, parent, event.tokens, self._number((event.salt, event.adapters)))
        elif isinstance(event, Removed):
            self._gone.append(event)
            if event.group == self._anchor:
                self._tree.remove(event.block)
        else:
            self._tree.clear()

    def _number(self, conditions: Conditions) -> int:
        return self._numbers.setdefault(conditions, len(self._numbers))

    def handed_out(self, blocks: Ints, rows: Ints, step: int) -> None:
        """A step gave these blocks to these requests; some of them were cached before.

        Args:
            blocks: [n].
            rows: [n], the request that each was for.
            step: The step.
        """
        if self._gone:
            owner = dict(zip(blocks.tolist(), rows.tolist(), strict=True))
            # A large page that goes to another group takes all its blocks with it.
            pages = dict(zip(self._pool.pages_of(blocks).tolist(), rows.tolist(), strict=True))
            gone = np.array([e.block for e in self._gone])
            whom = zip(gone.tolist(), self._pool.pages_of(gone).tolist(), strict=True)
            self._forget("evicted", step, [self._requests.name(owner[b] if b in owner else pages[p]) for b, p in whom])

    def withdrawn(self, step: int) -> None:
        """What was forgotten just now was wrong."""
        self._forget("withdrawn", step, [None] * len(self._gone))

    def reset(self, step: int) -> None:
        """All that is cached is about to be forgotten."""
        self._gone = [Removed(group, digest, block) for group, digest, block in self._cache.entries()]
        self._forget("reset", step, [None] * len(self._gone))

    def _forget(self, cause: Cause, step: int, requests: Sequence[str | None]) -> None:
        gone, self._gone = self._gone, []
        if gone:
            self._log.add([e.group for e in gone], [e.digest for e in gone], cause, step, requests)

    def freed(self, row: int) -> None:
        """A request has ended."""
        self._found.pop(row, None)

    # ---- a request enters

    def admitted(self, row: int, hit: int) -> None:
        """A request enters with a hit of `hit` tokens; called before anything of it is stored."""
        search = Search(self._requests, self._cache, self._tree, self._log, list(self._numbers), row, self._unit)
        self._found[row] = search.explain(hit) if self.enabled else search.disabled()


def not_explained() -> ConfigError:
    """What is said where nothing is kept to explain with."""
    return ConfigError(
        "misses are not explained",
        field="cache.explain",
        got=False,
        allowed=True,
        remedy="set cache.explain=true, or create the manager with explain=True",
    )
