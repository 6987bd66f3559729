"""`BackendChoice`: what the user asked of selection, as plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kvcore.registry.priority import Priorities

AUTO = "auto"


@dataclass(frozen=True)
class BackendChoice:
    """Which backend serves which kind of group, and with which options.

    Attributes:
        backend: A name or ``auto``.
        by_kind: Another name for the groups of one kind.
        options: Instances of each backend's `Config`, by backend name.
        priorities: Ranks for auto that go before the declared ones (`kvcore.registry.priority`).
    """

    backend: str = AUTO
    by_kind: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    priorities: Priorities = field(default_factory=dict)

    def wanted(self, kind: str) -> str | None:
        """The name asked for the groups of one kind, or None for auto."""
        name = self.by_kind.get(kind, AUTO)
        name = self.backend if name == AUTO else name
        return None if name == AUTO else name

    def key(self, kind: str) -> str:
        """The configuration key that decided for `kind`, for error messages."""
        return "backend" if self.by_kind.get(kind, AUTO) == AUTO else f"backend_by_kind.{kind}"
