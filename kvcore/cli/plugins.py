"""`kvcore plugins`: what is installed, and what is wrong with it."""

# ruff: noqa: RUF009  (`key` makes a dataclass field)
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvcore.cli.commands import Command
from kvcore.cli.result import Job, Result
from kvcore.config.schema import Root
from kvcore.settings.key import key

if TYPE_CHECKING:
    from kvcore.registry.records import PluginRecord
    from kvcore.registry.registry import Registry


@dataclass(frozen=True)
class Keys(Root):
    """Options with which backends are asked whether they can be used."""

    backends: dict[str, Any] = key({}, "options of the installed backends")


COMMAND = Command("plugins", "installed plugins and their state", Keys)


def execute(job: Job[Keys]) -> Result:
    """List every plugin of every installed distribution."""
    rows = plugin_rows(job.registry, job.composed.config.backends)
    lines = []
    for row in rows:
        lines.append(f"{row['name']:12} {row['state']:12} {row['distribution']} {row['version']}")
        lines += [f"    provides {what}" for what in row["provides"]]
        if row["reason"]:
            lines.append(f"    {row['reason']}")
    return Result({"plugins": rows}, "\n".join(lines) or "no plugin is installed")


def plugin_rows(registry: Registry, options: dict[str, Any]) -> list[dict[str, Any]]:
    """One row a plugin; a plugin whose backends all miss their library is ``unavailable``."""
    return [_row(record, registry, options) for record in registry.plugins]


def _row(record: PluginRecord, registry: Registry, options: dict[str, Any]) -> dict[str, Any]:
    from kvcore.registry.registry import told

    state, reason = ("broken", record.reason) if record.broken else ("ok", None)
    mine = [name for name, origin in registry.origins.items() if origin is record]
    if not record.broken:
        missing: list[str] = []
        for name in mine:
            spec = registry.backends[name]
            try:
                said = spec.unavailable(options.get(name, spec.Config()))
            except Exception as error:
                state, reason = "broken", f"{name}.unavailable raised {told(error)}"
                break
            missing += [said] if said is not None else []
        if state == "ok" and mine and len(missing) == len(mine):
            state, reason = "unavailable", "; ".join(missing)
    return {
        "name": record.name,
        "distribution": record.distribution,
        "version": record.version,
        "state": state,
        "reason": reason,
        "provides": list(record.provides),
        "options": {name: asdict(options.get(name, registry.backends[name].Config())) for name in mine},
    }
