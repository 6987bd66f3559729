"""What a run did not prove, in sentences: a green report says no more than it asked."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from kvcore.errors import BackendError
from kvcore.registry.registry import Registry
from kvcore.spec.content import Content
from kvcore.testing.cases.answers import asking
from kvcore.testing.cases.base import Opened, find_base
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.outcome import DECLARED, CellResult

_BY_PROOF = {
    "interpreter": "anything on a device: its kernels were interpreted",
    "host": "anything on a device: what ran is not its kernels",
    "emulated": "its kernels: what ran emulates them",
}


def not_proven(
    opened: Opened,
    results: Sequence[CellResult],
    unasked: Mapping[str, Sequence[str]],
    registry: Registry,
    content: type[Content] | None,
    further: int,
) -> list[str]:
    """What may not be concluded for one backend.

    Args:
        opened: The backend, as it was asked.
        results: Its cells.
        unasked: Per axis, the values that were left out because they take long.
        registry: The plugins, whose contents and retentions are named where nothing was asked of them.
        content: The content that was asked about, or None.
        further: Cases that level full asks beyond these.
    """
    found = []
    if opened.proof == DECLARED:
        found.append(f"anything but its declaration: {opened.missing}")
    elif opened.proof in _BY_PROOF:
        found.append(_BY_PROOF[opened.proof])
    if unasked:
        axes = "; ".join(f"{axis} {', '.join(values)}" for axis, values in unasked.items())
        found.append(f"what takes long to interpret and was not asked (cases=all asks it): {axes}")
    reasons = Counter(r.reason for r in results if r.outcome == "skipped" and r.reason != opened.missing)
    found += [f"{n} cases that cannot run here: {reason}" for reason, n in reasons.items()]
    if content is not None:
        found.append(f"anything but content {content.kind}; quantized caches and latents are not stored so")
    else:
        found += [f"content {kind}: ask with cache.content={kind}" for kind in _contents(opened, registry)]
    found += [
        f"retention {kind}: no case keeps its tokens so"
        for kind, cls in sorted(registry.retentions.items())
        if not cls.__module__.startswith("kvcore.")
    ]
    if further:
        found.append(f"what {further} more cases of level=full ask")
    return found


def _contents(opened: Opened, registry: Registry) -> list[str]:
    """Kinds of contents of plugins that the backend takes."""
    target, kinds = opened.target, []
    for kind, cls in sorted(registry.contents.items()):
        if cls.__module__.startswith("kvcore."):
            continue
        try:
            base = find_base(target)
            with asking():
                case = Case("base", "L0", "base", dtype=base.dtype, head_dim=base.head_dim).storing(cls)
                if case is not None and target.spec.unsupported(case.query(), target.options) is None:
                    kinds.append(kind)
        except BackendError:
            continue  # what the declaration raised is a failed case already
    return kinds
