"""What happened to cached prefixes, for routers, observers and explanations: stored, removed, cleared."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvcore.errors import ConfigError

if TYPE_CHECKING:  # a router reads events without numpy
    from kvcore.manage.ragged import Ints

DEVICE = "device"  # the only tier yet: blocks that kernels read where they lie


@dataclass(frozen=True)
class Stored:
    """The content of a block can be hit from now on.

    Attributes:
        group: KV group.
        digest: What the block is found by; it stands for all tokens up to the block's end.
        block: Block id.
        parent: Digest of the block before it in this group, or None for the first.
        tokens: The block's own token ids.
        salt: Of the requests that can find it.
        adapters: Digests of their adapters, in order.
        tier: Where the content lies.
    """

    group: int
    digest: bytes
    block: int
    parent: bytes | None
    tokens: tuple[int, ...]
    salt: str = ""
    adapters: tuple[bytes, ...] = ()
    tier: str = DEVICE


@dataclass(frozen=True)
class Removed:
    """A block was handed out, or its content withdrawn: it can no longer be hit."""

    group: int
    digest: bytes
    block: int
    tier: str = DEVICE


@dataclass(frozen=True)
class Cleared:
    """The whole prefix cache was reset."""

    tier: str = DEVICE


Event = Stored | Removed | Cleared


class EventLog:
    """Collects events until they are drained, and tells listeners; without either it costs and keeps nothing.

    Args:
        collect: Whether they are kept.

    Attributes:
        listeners: Told of each event as it happens.
    """

    def __init__(self, *, collect: bool) -> None:
        self.listeners: list[Callable[[Event], None]] = []
        self._collect = collect
        self._events: list[Event] = []

    @property
    def enabled(self) -> bool:
        """Whether anybody wants to know."""
        return self._collect or bool(self.listeners)

    def add(self, event: Event) -> None:
        """Keep and tell `event`, where anybody wants to know."""
        if self._collect:
            self._events.append(event)
        for listener in self.listeners:
            listener(event)

    def drain(self) -> list[Event]:
        """All events since the last call, oldest first.

        Raises:
            ConfigError: They are not collected.
        """
        if not self._collect:
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
