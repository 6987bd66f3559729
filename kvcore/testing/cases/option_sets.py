"""The options under which a backend is asked besides its own: what its declaration names, and every choice. No torch.

An option changes which kernels run, so that a backend which is right by default may be wrong under another value. One
option is changed at a time; sets of several are named by the declaration.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from enum import Enum
from typing import Any, Literal, get_args, get_origin, get_type_hints

from kvcore.errors import KVCoreError
from kvcore.testing.cases.base import find_base
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.catalogue import all_cases
from kvcore.testing.cases.covering import cover
from kvcore.testing.cases.planning import Target

# `Case.cost` of all cases under one set, by level.
BUDGETS = {"quick": 8_000, "full": 20_000}
Changes = Mapping[str, Any]


def under_options(target: Target, level: str) -> Iterator[Case]:
    """A covering set of cases under each set of options, around the plainest problem that it takes there.

    Args:
        target: The backend, its device, and the options in use.
        level: Named sets are asked from ``quick`` on, single choices at ``full`` alone.

    Raises:
        BackendError: The declaration raises.
    """
    if level not in BUDGETS:
        return
    sets: list[Changes] = list(target.spec.conform_options)
    sets += choices(target) if level == "full" else []
    for changes in sets:
        other = changed(target, changes)
        if other is None or other.options == target.options:
            continue
        cases = [c for c in all_cases(level, find_base(other)) if c.level != "L0"]
        for case in cover(cases, BUDGETS[level]):
            mine = replace(case, options=tuple(changes.items()))
            yield replace(mine, id=f"{case.id}@{mine.options_name}")


def changed(target: Target, changes: Changes) -> Target | None:
    """The target with other options, or None where they do not go with the others or nothing can run under them."""
    try:
        options = replace(target.options, **changes)
        gone = target.spec.unavailable(options) or target.spec.unsupported_device(target.facts, options)
    except (KVCoreError, TypeError):
        return None  # what is named and no option, the case `L0.options` tells
    return None if gone else replace(target, options=options)


def choices(target: Target) -> list[Changes]:
    """Every value of every option whose values are known: booleans, literals, enumerations, ``choices`` of a field."""
    hints = get_type_hints(type(target.options))
    found: list[Changes] = []
    for f in fields(target.options):
        if f.name not in target.spec.stand_ins:
            values = f.metadata.get("choices") or _values(hints[f.name])
            found += [{f.name: value} for value in values if value != getattr(target.options, f.name)]
    return found


def _values(hint: Any) -> Sequence[Any]:
    if hint is bool:
        return (False, True)
    if get_origin(hint) is Literal:
        return get_args(hint)
    return list(hint) if isinstance(hint, type) and issubclass(hint, Enum) else ()
