"""What is known of one installed plugin: where it comes from, and whether it works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, PackageMetadata, entry_points
from typing import Any

from kvcore.registry.hookspecs import PROJECT


@dataclass(frozen=True)
class PluginSource:
    """A plugin that can be loaded.

    Attributes:
        name: Name of the entry point.
        distribution, version: The installed distribution that brings it.
        load: Imports the plugin and returns its module (or any object with hook implementations).
    """

    name: str
    distribution: str
    version: str
    load: Callable[[], Any]

    @property
    def built_in(self) -> bool:
        """Whether it comes with kvcore itself: nobody else may claim its names."""
        return self.distribution == PROJECT


@dataclass
class PluginRecord:
    """One plugin and its state.

    Attributes:
        name, distribution, version: As in `PluginSource`.
        reason: Why it, or part of it, is broken; None when all is well.
        provides: What it brings, such as ``backend torch`` or ``hook kvcore_step_finished``.
    """

    name: str
    distribution: str
    version: str
    reason: str | None = None
    provides: list[str] = field(default_factory=list)

    @property
    def id(self) -> str:
        """Distribution and entry point: two distributions may call theirs alike."""
        return f"{self.distribution}/{self.name}"

    @property
    def built_in(self) -> bool:
        """As in `PluginSource`."""
        return self.distribution == PROJECT

    @property
    def origin(self) -> str:
        """The distribution with its version, for messages."""
        return f"{self.distribution} {self.version}"

    @property
    def broken(self) -> bool:
        """Whether something of it does not work."""
        return self.reason is not None

    def fail(self, reason: str) -> None:
        """Note why it is broken; several reasons are kept, each once."""
        if reason not in (self.reason or "").split("; "):
            self.reason = reason if self.reason is None else f"{self.reason}; {reason}"


def installed_sources() -> list[PluginSource]:
    """The entry points of group ``kvcore`` of every installed distribution, sorted by name."""
    points = sorted(entry_points(group=PROJECT), key=lambda p: (p.name, p.value))
    # Read once each: a distribution parses its metadata again for whoever asks for its name, and for its version.
    facts = {dist: dist.metadata for dist in {p.dist for p in points} if dist is not None}
    return [_source(p, None if p.dist is None else facts[p.dist]) for p in points]


def _source(point: EntryPoint, facts: PackageMetadata | None) -> PluginSource:
    name, version = ("unknown", "unknown") if facts is None else (facts["Name"], facts["Version"])
    return PluginSource(point.name, name, version, point.load)
