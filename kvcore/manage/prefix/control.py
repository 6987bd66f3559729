"""`PrefixControl`: what a manager is asked about its prefix cache, beside the steps."""

from __future__ import annotations

from kvcore.errors import RequestError
from kvcore.manage.block_pool import BlockPool
from kvcore.manage.explain.explainer import Explainer, not_explained
from kvcore.manage.explain.explanation import Explanation
from kvcore.manage.prefix.prefixes import Pins, Prefixes
from kvcore.manage.requests import Requests
from kvcore.manage.step import Step
from kvcore.manage.watch.events import Event, EventLog, in_ids


class PrefixControl:
    """Look up, explain, pin, follow and reset; `KVCacheManager` is the rest of it."""

    requests: Requests
    _pool: BlockPool
    _prefixes: Prefixes
    _pins: Pins
    _events: EventLog
    _explainer: Explainer | None
    _open: Step | None
    _step: int

    def lookup(self, row: int) -> int:
        """Tokens that a request, not yet admitted, would get from the prefix cache now."""
        self.requests.check_one(row)
        if self.requests.admitted[row]:
            raise RequestError("this request is admitted already", field="row", got=self.requests.name(row))
        return self._prefixes.find(row).tokens

    def take_events(self) -> list[Event]:
        """Events since the last call, oldest first; `ConfigError` unless they are collected."""
        return in_ids(self._events.drain(), self._pool.first)

    def explain(self, row: int) -> Explanation:
        """Where the reuse of a request ended and why, as it was when the request was admitted.

        Raises:
            ConfigError: Nothing is kept to explain with.
            RequestError: The request is not there, or not admitted.
        """
        self.requests.check_one(row)
        if self._explainer is None:
            raise not_explained()
        return self._explainer.of(row)

    def pin(self, row: int) -> int:
        """Keep what a request has cached, a system prompt say, until `unpin`: no full cache evicts it.

        Pinned blocks count as used. After a reset of the cache they hold nothing that can be hit.
        """
        self.requests.check_one(row)
        self._open = None
        return self._pins.add(self._prefixes.known(row))

    def unpin(self, pin: int) -> None:
        """Let go of what `pin` kept; `RequestError` for a number that is not held."""
        self._open = None
        self._pins.remove(pin)

    def reset_prefix_cache(self) -> None:
        """Forget all cached content (new weights, say); requests that run now will not enter it again."""
        self._open = None
        if self._explainer is not None:
            self._explainer.reset(self._step + 1)
        self._pool.uncache(self._prefixes.reset())
