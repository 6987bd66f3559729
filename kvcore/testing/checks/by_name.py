"""Every check by the name that cases carry."""

from __future__ import annotations

from collections.abc import Callable

from kvcore.testing.cases.outcome import Measure
from kvcore.testing.checks import declaration
from kvcore.testing.checks.attend import check_attend
from kvcore.testing.checks.context import Context
from kvcore.testing.checks.lse import check_batch_invariant, check_capture, check_deterministic, check_merge
from kvcore.testing.checks.robust import check_offsets, check_padded, check_placement, check_steps
from kvcore.testing.checks.write import check_write

CHECKS: dict[str, Callable[[Context], Measure]] = {
    "contract": declaration.check_contract,
    "options": declaration.check_options,
    "no_torch": declaration.check_no_torch,
    "devices": declaration.check_devices,
    "fails_closed": declaration.check_fails_closed,
    "refusals": declaration.check_refusals,
    "layouts": declaration.check_layouts,
    "page_bytes": declaration.check_page_bytes,
    "stand_ins": declaration.check_stand_ins,
    "stable": declaration.check_stable,
    "core_profile": declaration.check_core_profile,
    "write": check_write,
    "attend": check_attend,
    "placement": check_placement,
    "padded": check_padded,
    "steps": check_steps,
    "offsets": check_offsets,
    "merge": check_merge,
    "capture": check_capture,
    "deterministic": check_deterministic,
    "batch_invariant": check_batch_invariant,
}
