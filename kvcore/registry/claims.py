"""Who keeps a name that several plugins claim."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from kvcore.registry.records import PluginRecord


class Claim(NamedTuple):
    """One plugin's claim on one name.

    Attributes:
        name: The name.
        value: What it stands for.
        record: The plugin.
    """

    name: str
    value: Any
    record: PluginRecord


def settle(claims: Sequence[Claim], what: str, *, reserved: Collection[str] = ()) -> tuple[list[Claim], dict[str, str]]:
    """The claims that hold, and why the other names serve nobody.

    A name of kvcore itself stays with kvcore: whoever else claims it is left out. Where two others claim a name,
    neither has a better right, and a choice between them would be silent: both are left out. Every plugin that
    loses a claim is marked as broken, with the reason.

    Args:
        claims: All claims of one kind.
        what: The kind, for the reasons.
        reserved: Names of kvcore that no claim stands for.
    """
    by_name: dict[str, list[Claim]] = {}
    for claim in claims:
        by_name.setdefault(claim.name, []).append(claim)
    kept: list[Claim] = []
    refused: dict[str, str] = {}
    for name, rivals in by_name.items():
        ours = [c for c in rivals if c.record.built_in]
        if len(ours) == 1 or (not ours and len(rivals) == 1 and name not in reserved):
            kept += ours or rivals
        losers = [c for c in rivals if c not in kept]
        if ours or name in reserved:
            reason = f"{what} {name} belongs to the core and cannot be replaced"
        else:
            reason = f"{what} {name} is declared twice, by " + " and by ".join(c.record.origin for c in rivals)
        for claim in losers:
            claim.record.fail(reason)
        if not ours and losers:
            refused[name] = reason
    return kept, refused
