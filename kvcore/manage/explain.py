"""`Explainer`: why a prefix was not found, worked out when the request is admitted."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from kvcore.errors import ConfigError, RequestError
from kvcore.manage.block_hash import Adapter
from kvcore.manage.prefix_cache import PrefixCache
from kvcore.manage.ragged import Ints
from kvcore.manage.requests import Origin, Requests

MissReason = Literal[
    "none", "disabled", "first", "token", "salt", "adapter", "multimodal", "not_computed", "reset", "window", "evicted"
]


class Miss(NamedTuple):
    """Why the hit of a request ended where it did.

    Attributes:
        reason: ``none``: all that can be reused was. ``disabled``: no prefix caching. ``first``: no
            remembered request begins alike. ``token``: the tokens differ at `position`. ``salt``,
            ``adapter``, ``multimodal``: equal tokens under other conditions. ``not_computed``: the other
            request had not computed them yet. ``reset``: the cache was cleared since. ``window``: a window
            or chunk had moved on, and its blocks served others. ``evicted``: a block served others.
        cached_tokens: Tokens that were reused.
        possible_tokens: Tokens that could have been, had everything been there.
        position: First differing token, or first token of the first missing block, or None.
        other: The remembered request that came closest, or None.
        group: The group that lacked a block, or None.
        text: The same for people.
    """

    reason: MissReason
    cached_tokens: int
    possible_tokens: int
    position: int | None
    other: str | None
    group: int | None
    text: str


@dataclass
class _Remembered:
    """An admitted request; its row while it runs, then how far it had come."""

    origin: Origin
    row: int | None
    epoch: int
    tokens: Ints
    digests: list[bytes]
    committed: int = 0

    @property
    def adapters(self) -> list[bytes]:
        return sorted(e.digest for e in self.origin.extras if isinstance(e, Adapter))

    @property
    def items(self) -> list[object]:
        return [e for e in self.origin.extras if not isinstance(e, Adapter)]


class Explainer:
    """Remembers the last `history` requests; without history it costs nothing.

    Args:
        requests: The requests, only read.
        cache: The prefix cache, only read.
        history: Requests to remember, 0 for none.
        enabled: Whether prefixes are cached at all.
    """

    def __init__(self, requests: Requests, cache: PrefixCache, history: int, *, enabled: bool) -> None:
        if history < 0:
            raise ConfigError("explain_history is negative", field="cache.explain_history", got=history, allowed=">= 0")
        self._requests, self._cache, self._enabled = requests, cache, enabled
        self._history = history
        self._others: deque[_Remembered] = deque(maxlen=history)
        self._misses: OrderedDict[str, Miss] = OrderedDict()
        self.epoch = 0  # of the prefix cache

    def miss(self, request_id: str) -> Miss:
        """What `admitted` found for a request.

        Raises:
            ConfigError: Nothing is remembered.
            RequestError: The request was not admitted, or too long ago.
        """
        if not self._history:
            raise ConfigError(
                "misses are not explained",
                field="cache.explain_history",
                got=0,
                allowed=">= 1",
                remedy="set cache.explain_history to the number of requests to remember",
            )
        if request_id not in self._misses:
            raise RequestError("no admission of this request is remembered", field="request_id", got=request_id)
        return self._misses[request_id]

    def admitted(self, row: int, hit: int) -> None:
        """A request enters with a hit of `hit` tokens; called before anything of it is stored."""
        if not self._history:
            return
        r = self._requests
        request = _Remembered(r.origin(row), row, self.epoch, r.tokens.view(row).copy(), r.chain(row).digests)
        name = r.name(row)
        self._misses[name] = self._explain(request, hit)
        self._misses.move_to_end(name)
        while len(self._misses) > self._history:
            self._misses.popitem(last=False)
        self._others.append(request)

    def freed(self, row: int) -> None:
        """A request ends: what was computed of it is kept."""
        for request in self._others:
            if request.row == row:
                request.committed, request.row = int(self._requests.committed[row]), None

    def _committed(self, request: _Remembered) -> int:
        return request.committed if request.row is None else int(self._requests.committed[request.row])

    def _explain(self, request: _Remembered, hit: int) -> Miss:
        unit = self._cache.unit
        possible = (len(request.tokens) - 1) // unit * unit
        base = Miss("none", hit, possible, None, None, None, "everything that can be reused was")
        if not self._enabled:
            return base._replace(reason="disabled", text="prefix caching is off")
        if hit == possible:
            return base
        best, common = self._closest(request, possible)
        if best is None:
            return base._replace(reason="first", position=0, text="no remembered request begins with the same token")
        name, reach = best.origin.name, min(common, possible) // unit * unit
        base = base._replace(position=hit, other=name)
        if reach <= hit:
            return base._replace(
                reason="token", position=common, text=f"token {common} differs from request {name}, or ends it"
            )
        alike = f"request {name} has the same first {common} tokens"
        if best.origin.salt != request.origin.salt:
            return base._replace(reason="salt", text=f"{alike}, under another salt")
        if best.adapters != request.adapters:
            return base._replace(reason="adapter", text=f"{alike}, with another adapter")
        if best.items != request.items:
            return base._replace(reason="multimodal", text=f"{alike}, standing for other items")
        if best.epoch != request.epoch:
            return base._replace(reason="reset", text=f"{alike}, but the cache was reset since it began")
        if self._committed(best) < reach:
            done = f"{self._committed(best)} of them were computed"
            return base._replace(reason="not_computed", position=self._committed(best), text=f"{alike}, but {done}")
        return self._missing(base, request, best, reach)

    def _closest(self, request: _Remembered, possible: int) -> tuple[_Remembered | None, int]:
        """The most reusable common beginning; of equal ones, the likest conditions, then the newest."""
        best, common, best_rank = None, 0, (0, False, False, False, 0)
        for other in self._others:
            length = common_prefix(request, other)
            rank = (
                min(length, possible) // self._cache.unit,
                other.origin.salt == request.origin.salt,
                other.adapters == request.adapters,
                other.items == request.items,
                length,
            )
            if length and rank >= best_rank:
                best, common, best_rank = other, length, rank
        return best, common

    def _missing(self, base: Miss, request: _Remembered, best: _Remembered, reach: int) -> Miss:
        """Which group lacks which block of the first `reach` tokens; groups that keep everything first."""
        for rule in sorted(self._requests.rules, key=lambda r: r.drops):
            span = self._cache.spans[rule.index]
            for b in range(rule.first_block(reach), reach // rule.block_size):
                if self._cache.get(rule.index, request.digests[(b + 1) * span - 1]) is None:
                    position, moved = b * rule.block_size, b < rule.first_block(self._committed(best))
                    what = f"group {rule.index} lacks the block of token {position}"
                    why = "the window had moved on" if moved else "it was evicted"
                    return base._replace(
                        reason="window" if moved else "evicted",
                        position=position,
                        group=rule.index,
                        text=f"{what}: {why} and it serves other tokens now",
                    )
        return base._replace(reason="evicted", text="the block was evicted")


def common_prefix(a: _Remembered, b: _Remembered) -> int:
    """Length of the common beginning of two requests' tokens."""
    length = min(len(a.tokens), len(b.tokens))
    unlike = (a.tokens[:length] != b.tokens[:length]).nonzero()[0]
    return int(unlike[0]) if len(unlike) else length
