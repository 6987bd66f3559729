"""Which backend serves which caches, and why not the others.

Caches of equal spec form a class: they can share a block table, so one backend serves all their layers.
Every installed backend is asked about every class, and every answer is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

from kvcore.attention.declaration import DeviceFacts
from kvcore.attention.query import AttentionQuery
from kvcore.errors import BackendUnavailableError, BackendUnsupportedError, Refusal, plain
from kvcore.plan.groups import LayoutOffer
from kvcore.registry.candidates import Question, Status, Verdict, judge
from kvcore.registry.choice import BackendChoice
from kvcore.registry.priority import given, rank
from kvcore.registry.registry import Registry
from kvcore.spec.cache_spec import CacheId, KVCacheSpec, shown

Purpose = Literal["run", "plan"]


@dataclass(frozen=True)
class Candidate:
    """One backend's standing for one class.

    Attributes:
        name: Name of the backend.
        status: chosen, usable, unsupported or unavailable.
        verdict: The full answer: reason, layouts, whether the library is installed here.
        priority: Its declared rank on this device.
    """

    name: str
    status: Status
    verdict: Verdict
    priority: int

    def as_dict(self) -> dict[str, Any]:
        """The entry of `kvcore backends`."""
        why = self.verdict.reason
        return {
            "name": self.name,
            "status": self.status,
            "installed_here": self.verdict.installed_here,
            "priority": self.priority,
            "proof": self.verdict.proof,
            "reason": why and {k: plain(getattr(why, k)) for k in ("field", "got", "allowed")},
        }


class PassedOver(NamedTuple):
    """A backend that `auto` might have taken, had its plugin been sound.

    Attributes:
        name: The backend, or the entry point of a plugin that did not get as far as to declare one.
        reason: What is wrong with it.
    """

    name: str
    reason: str


@dataclass(frozen=True)
class ClassChoice:
    """The backends of one class of caches.

    Attributes:
        kind: full, window, chunk, latent, encoder or state.
        cache_ids: The caches of the class.
        candidates: Every backend, in the order in which they were considered.
        key: The configuration key that decided.
        wanted: The name asked for, or None for auto.
        planned: Chosen for a plan: what is missing on this machine does not count.
        passed_over: What `auto` might have taken instead, were it not broken.
    """

    kind: str
    cache_ids: tuple[CacheId, ...]
    candidates: tuple[Candidate, ...]
    key: str
    wanted: str | None
    planned: bool = False
    passed_over: tuple[PassedOver, ...] = ()

    @property
    def chosen(self) -> Candidate | None:
        """The backend that serves the class, or None."""
        return next((c for c in self.candidates if c.status == "chosen"), None)

    def as_dict(self) -> dict[str, Any]:
        """The entry of `kvcore backends`."""
        return {
            "kind": self.kind,
            "layers": [str(c) for c in self.cache_ids],
            "asked_for": self.wanted,
            "chosen": self.chosen.name if self.chosen else None,
            "passed_over": [p._asdict() for p in self.passed_over],
            "candidates": [c.as_dict() for c in self.candidates],
        }


@dataclass(frozen=True)
class Selection:
    """The choice for every class, with the layouts that follow from it.

    Attributes:
        classes: One entry a class of caches, in model order.
        offers: The input of `kvcore.plan`: backend and layouts of every cache that owns bytes.
        given: The options of every backend, by name.
    """

    classes: tuple[ClassChoice, ...]
    offers: Mapping[CacheId, LayoutOffer]
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def options(self) -> dict[str, dict[str, Any]]:
        """The options of the backends that were chosen, by name: what was planned holds with these."""
        names = {c.chosen.name for c in self.classes if c.chosen}
        return {name: asdict(self.given[name]) for name in sorted(names) if name in self.given}

    @property
    def passed_over(self) -> list[dict[str, str | None]]:
        """What `auto` passed over because it is broken, for machines."""
        return [
            {"kind": c.kind, "chosen": c.chosen.name if c.chosen else None, **p._asdict()}
            for c in self.classes
            for p in c.passed_over
        ]

    @property
    def notes(self) -> tuple[str, ...]:
        """The same for people."""
        return tuple(
            f"backend=auto takes {row['chosen'] or 'none'} for the {row['kind']} caches without {row['name']}, "
            f"which is broken: {row['reason']}"
            for row in self.passed_over
        )


class _Class(NamedTuple):
    spec: KVCacheSpec
    cache_ids: tuple[CacheId, ...]
    queries: tuple[AttentionQuery, ...]


def choose_backends(
    caches: Mapping[CacheId, KVCacheSpec],
    queries: Mapping[CacheId, AttentionQuery],
    device: DeviceFacts,
    choice: BackendChoice,
    registry: Registry,
    *,
    purpose: Purpose = "run",
    shared: Mapping[CacheId, CacheId] | None = None,
    block_size: int | None = None,
    block_size_by_kind: Mapping[str, int] | None = None,
    block_first_only: bool = False,
    strict: bool = True,
) -> Selection:
    """Choose a backend for every class of caches.

    Args:
        caches: The caches that own bytes.
        queries: The attention of every layer that reads one, shared readers included.
        device: The device, present or not.
        choice: Names, names by kind, options.
        registry: Where the declarations are.
        purpose: ``plan`` takes backends whose library is missing here, and goes without any (the core's
            plain layout) where `auto` finds none; ``run`` does neither.
        shared: Caches without bytes, and whose they read: those must serve their queries too.
        block_size: `cache.block_size`; a backend that cannot cut it into kernel blocks is no candidate.
        block_size_by_kind: `cache.block_size_by_kind`, the kinds that have one.
        block_first_only: Set for `cache.placement=packed`: field-first layouts do not count.
        strict: False keeps going where nothing can serve, for a listing (`kvcore backends`).

    Returns:
        The selection; states never have a backend.

    Raises:
        UnknownBackendError, PluginError: A name asked for is not installed, or its plugin is broken.
        BackendUnavailableError: The backend asked for misses its library or kernels.
        BackendUnsupportedError: The backend asked for cannot serve, or none can; carries the reasons.
    """
    for kind, name in {"": choice.backend, **choice.by_kind}.items():
        if name != "auto":
            registry.backend(name, key=f"backend_by_kind.{kind}" if kind else "backend")
    rows: list[ClassChoice] = []
    offers: dict[CacheId, LayoutOffer] = {}
    for members in _classes(caches, queries, shared or {}):
        if members.spec.content.per_request:
            row = ClassChoice("state", members.cache_ids, (), "backend", None)
        else:
            size = (block_size_by_kind or {}).get(members.spec.kind, block_size)
            question = Question(members.spec, members.queries, device, purpose == "plan", size, block_first_only)
            row = _choose(members, question, choice, registry)
            if strict and row.chosen is None and (row.wanted is not None or purpose == "run"):
                raise _refusal(row)
        rows.append(row)
        offers |= {cache: _offer(row, registry) for cache in members.cache_ids}
    return Selection(tuple(rows), offers, choice.options)


def _classes(
    caches: Mapping[CacheId, KVCacheSpec], queries: Mapping[CacheId, AttentionQuery], shared: Mapping[CacheId, CacheId]
) -> list[_Class]:
    readers: dict[CacheId, list[CacheId]] = {c: [c] for c in caches}
    for reader, owner in shared.items():
        readers[owner].append(reader)
    ids: dict[KVCacheSpec, list[CacheId]] = {}
    for cache, spec in caches.items():
        ids.setdefault(spec, []).append(cache)
    found = []
    for spec, members in ids.items():
        asked = [queries[r] for owner in members for r in readers[owner] if r in queries]
        found.append(_Class(spec, tuple(members), tuple(dict.fromkeys(asked))))
    return found


def _choose(members: _Class, question: Question, choice: BackendChoice, registry: Registry) -> ClassChoice:
    kind = members.spec.kind
    wanted, key = choice.wanted(kind), choice.key(kind)
    ranks = {name: rank(spec, question.device, kind, choice.priorities) for name, spec in registry.backends.items()}
    ranked = sorted(registry.backends.items(), key=lambda item: (-ranks[item[0]], item[0]))
    verdicts = {name: judge(spec, question, choice.options.get(name)) for name, spec in ranked}
    usable = [name for name, verdict in verdicts.items() if verdict.status == "usable"]
    if wanted is not None:
        chosen = wanted if wanted in usable else None
    else:
        # A plugin may only prefer; that somebody's library is missing is never its business to decide.
        willing = [name for name in usable if not verdicts[name].by_hand_only]
        chosen = registry.choose(kind, willing, question.device) if willing else None
        chosen = chosen or (willing[0] if willing else None)
    candidates = [
        Candidate(name, "chosen" if name == chosen else verdict.status, verdict, ranks[name])
        for name, verdict in verdicts.items()
    ]
    candidates += [
        Candidate(name, "unavailable", Verdict.broken(reason, sorted(registry.backends)), 0)
        for name, reason in sorted(registry.refused.items())
    ]
    over = () if wanted is not None else _passed_over(candidates, chosen, kind, question.device, choice, registry)
    return ClassChoice(kind, members.cache_ids, tuple(candidates), key, wanted, question.ignore_unavailable, over)


def _passed_over(
    candidates: Sequence[Candidate],
    chosen: str | None,
    kind: str,
    device: DeviceFacts,
    choice: BackendChoice,
    registry: Registry,
) -> tuple[PassedOver, ...]:
    """Broken backends that would go before `chosen`; one whose rank nothing tells might."""
    best = next((c.priority for c in candidates if c.name == chosen), None)
    found: dict[str, str] = {}
    for candidate in candidates:
        name = candidate.name
        broken = candidate.verdict.reason is not None and candidate.verdict.reason.field == "plugin"
        known = given(name, device, kind, choice.priorities) if name in registry.refused else candidate.priority
        if broken and (best is None or known is None or known > best):
            found[name] = registry.refused.get(name) or str(candidate.verdict.missing)
    for record in registry.plugins:
        if record.broken and not record.provides:
            found.setdefault(record.name, f"{record.reason} (plugin {record.name}, {record.origin})")
    return tuple(PassedOver(*item) for item in found.items())


def _offer(row: ClassChoice, registry: Registry) -> LayoutOffer:
    chosen = row.chosen
    if chosen is None:
        return LayoutOffer()
    return LayoutOffer(chosen.name, tuple(chosen.verdict.layouts), registry.backends[chosen.name].max_offset_bits)


def _refusal(row: ClassChoice) -> Exception:
    usable = [c.name for c in row.candidates if c.status == "usable"]
    layers = shown(row.cache_ids)
    if row.wanted is None:
        reasons = {c.name: c.verdict.why for c in row.candidates}
        return BackendUnsupportedError(
            f"no installed backend can serve the {row.kind} caches of {layers}: "
            + ("; ".join(f"{n}: {r}" for n, r in reasons.items()) or "none is installed"),
            field=row.key,
            got="auto",
            allowed=reasons or "an installed backend",
            remedy="change what the reasons name, or install another backend (see `kvcore backends`)",
        )
    mine = next(c for c in row.candidates if c.name == row.wanted)
    refusal = mine.verdict.reason or Refusal(row.key, row.wanted)
    remedy = f"nearest usable backend: {row.key}={usable[0]}" if usable else "no installed backend can serve"
    if mine.verdict.missing is not None and not row.planned:
        also = f"; nor could it serve: {mine.verdict.why}" if mine.status == "unsupported" else ""
        return BackendUnavailableError(
            f"backend {row.wanted} is not available on this machine: {mine.verdict.missing}{also}",
            field=row.key,
            got=row.wanted,
            allowed=usable or "no other backend is usable",
            remedy=remedy,
        )
    return BackendUnsupportedError.of(
        replace(refusal, remedy=remedy), f"backend {row.wanted} cannot serve the {row.kind} caches of {layers}"
    )
