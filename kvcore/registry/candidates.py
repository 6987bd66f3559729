"""What one backend answers about one class of caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.attention.query import AttentionQuery
from kvcore.errors import KVCoreError, Refusal
from kvcore.registry.registry import told
from kvcore.spec.cache_spec import KVCacheSpec
from kvcore.spec.layout import LayoutOption

Status = Literal["chosen", "usable", "unsupported", "unavailable"]
# Options that make a backend run where it otherwise could not; `auto` never chooses such a backend.
STAND_INS = ("interpret", "emulate")


class Question(NamedTuple):
    """Everything that the answer may depend on.

    Attributes:
        spec: The caches' spec.
        queries: Every distinct attention that reads them.
        device: The device.
        ignore_unavailable: Planning: a missing library does not count.
        block_size: As asked, or None for auto.
        block_first_only: Field-first layouts do not count.
    """

    spec: KVCacheSpec
    queries: Sequence[AttentionQuery]
    device: DeviceFacts
    ignore_unavailable: bool = False
    block_size: int | None = None
    block_first_only: bool = False


@dataclass(frozen=True)
class Verdict:
    """The answer.

    Attributes:
        status: usable, unsupported or unavailable.
        missing: What is missing on this machine and how to get it, or None.
        reason: Why it is not usable, or None.
        layouts: The layouts that remain, in order of the backend's preference.
        by_hand_only: It is usable through a stand-in for the device; `auto` passes it over.
        proof: What a run with these options is: ``device``, or the stand-in that takes its place.
    """

    status: Status
    missing: str | None = None
    reason: Refusal | None = None
    layouts: tuple[LayoutOption, ...] = ()
    by_hand_only: bool = False
    proof: str = "device"

    @property
    def why(self) -> str:
        """The reason, for people."""
        if self.reason is None or self.reason.field == "unavailable":
            return str(self.reason.got) if self.reason is not None else ""
        allowed = "" if self.reason.allowed is None else f" (allowed: {self.reason.allowed})"
        return f"{self.reason.field}: {self.reason.got}{allowed}"

    @property
    def installed_here(self) -> bool:
        """Whether library and kernels are on this machine."""
        return self.missing is None

    @classmethod
    def broken(cls, reason: str, allowed: object) -> Verdict:
        """The verdict on a backend whose plugin is broken."""
        return cls("unavailable", reason, Refusal("plugin", reason, allowed))


def judge(spec: type[BackendSpec], question: Question, options: Any = None) -> Verdict:
    """Ask a declaration; whatever it raises makes it unavailable, with what it said as the reason."""
    try:
        return _judge(spec, question, spec.Config() if options is None else options)
    except KVCoreError as error:
        return Verdict("unsupported", None, replace(error.refusal, field=error.field or "options"))
    except Exception as error:
        return Verdict.broken(f"the declaration of {spec.name} raised {told(error)}", "an answer")


def _judge(spec: type[BackendSpec], question: Question, options: Any) -> Verdict:
    missing = spec.unavailable(options)
    stand_in = any(getattr(options, name, False) for name in (*STAND_INS, *spec.stand_ins))
    unsupported = spec.unsupported_device(question.device, options)
    for query in question.queries:
        unsupported = unsupported or spec.unsupported(query, options)
    if unsupported is not None:
        return Verdict("unsupported", missing, unsupported)
    layouts = list(spec.layouts(question.spec, question.device, options))
    for option in layouts:
        option.layout.check(question.spec.content)
    remaining, reason = _remaining(layouts, question)
    if reason is not None:
        return Verdict("unsupported", missing, reason)
    if missing is not None and not question.ignore_unavailable:
        return Verdict("unavailable", missing, Refusal("unavailable", missing, None), tuple(remaining))
    proof = spec.proof(options, question.device)
    return Verdict("usable", missing, None, tuple(remaining), by_hand_only=stand_in, proof=proof)


def _remaining(layouts: list[LayoutOption], question: Question) -> tuple[list[LayoutOption], Refusal | None]:
    """The layouts that serve the placement and block size asked for, or why there is none."""
    if not layouts:
        return [], Refusal("content", question.spec.content.kind, "a content that it has a layout for")
    left = layouts
    if question.block_first_only:
        left = [o for o in layouts if o.layout.order == "block_first"]
        if not left:
            names = ", ".join(o.layout.name for o in layouts)
            return [], Refusal("cache.placement", f"packed with {names} (field-first)", "slots")
    size = question.block_size
    if size is not None:
        fitting = [o for o in left if o.kernel_blocks.fit(size) is not None]
        if not fitting:
            allowed = [f"{o.layout.name}: {o.kernel_blocks}" for o in left]
            return [], Refusal("cache.block_size", size, allowed)
        left = fitting
    return left, None
