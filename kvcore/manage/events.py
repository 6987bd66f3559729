"""What happened to cached prefixes, for routers and stores: stored, removed, cleared."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcore.errors import ConfigError

if TYPE_CHECKING:  # a router reads events without numpy
    from kvcore.manage.ragged import Ints


@dataclass(frozen=True)
class Stored:
    """The content of a block can be hit from now on.

    Attributes:
        group: KV group.
        digest: What the block is found by; it stands for all tokens up to the block's end.
        block: Block id.
        parent: Digest of the block before it in this group, or None for the first.
        tokens: The block's own token ids.
    """

    group: int
    digest: bytes
    block: int
    parent: bytes | None
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Removed:
    """A block was evicted: its content can no longer be hit."""

    group: int
    digest: bytes
    block: int


@dataclass(frozen=True)
class Cleared:
    """The whole prefix cache was reset."""


Event = Stored | Removed | Cleared


class EventLog:
    """Collects events until they are drained; without `enabled` it costs and keeps nothing."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self._events: list[Event] = []

    def add(self, event: Event) -> None:
        """Keep `event` when enabled."""
        if self.enabled:
            self._events.append(event)

    def drain(self) -> list[Event]:
        """All events since the last call, oldest first.

        Raises:
            ConfigError: They are not collected.
        """
        if not self.enabled:
            raise ConfigError(
                "events are not collected",
                field="events",
                got=False,
                allowed=True,
                remedy="create the manager with events=True",
            )
        events, self._events = self._events, []
        return events


def in_ids(events: list[Event], first: Ints | None) -> list[Event]:
    """Events of blocks that are numbered over all groups, in ids of each group.

    Args:
        events: As collected.
        first: By group, the number of its first id; None where all groups share one numbering.
    """
    if first is None:
        return events
    return [e if isinstance(e, Cleared) else replace(e, block=e.block - int(first[e.group])) for e in events]
