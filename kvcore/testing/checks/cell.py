"""`Cell`: one case on one backend, from the question to the outcome."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from kvcore.errors import Refusal
from kvcore.testing.cases.answers import raised, seen_to_refuse, timed, well_formed
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.outcome import CannotJudge, CellResult, CheckFailure, Measure, Outcome, Refused
from kvcore.testing.cases.planning import Target
from kvcore.testing.checks import declaration
from kvcore.testing.checks.attend import check_attend
from kvcore.testing.checks.context import Context, Instance
from kvcore.testing.checks.lse import check_batch_invariant, check_capture, check_deterministic, check_merge
from kvcore.testing.checks.own_content import check_content, check_copies
from kvcore.testing.checks.robust import check_offsets, check_padded, check_placement
from kvcore.testing.checks.steps import check_steps, check_twice, check_walk
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
    "content": check_content,
    "copies": check_copies,
    "write": check_write,
    "attend": check_attend,
    "placement": check_placement,
    "padded": check_padded,
    "steps": check_steps,
    "walk": check_walk,
    "twice": check_twice,
    "offsets": check_offsets,
    "merge": check_merge,
    "capture": check_capture,
    "deterministic": check_deterministic,
    "batch_invariant": check_batch_invariant,
}


# Cost of a case up to which interpreted and emulated backends run it twice.
CHEAP = 100


class _Seat:
    """What cases of one set of options run on.

    Attributes:
        target: Backend, options, device.
        instance: The backend that they share.
        before: What it has run.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.instance = Instance(target)
        self.before: list[Case] = []

    def drop(self) -> tuple[Case, ...]:
        """What it had run; the next case meets a new instance."""
        before = tuple(self.before)
        self.instance.drop()
        self.before.clear()
        return before


class Cell:
    """Runs cases one after the other on one instance of the backend, and each on a fresh one as well.

    Args:
        target: Backend, options, device.
        proof: What a pass proves.
        probe: Whether refused cases are run as well.
    """

    def __init__(self, target: Target, proof: str, probe: bool) -> None:
        self.target, self.proof = target, proof
        self._seats: dict[Any, _Seat] = {}
        # A kernel that was never meant to run may leave a GPU unusable for the rest of the process.
        self.probe = probe and target.device == "cpu" and proof in ("device", "interpreter")

    def run(self, case: Case) -> CellResult:
        """The outcome; nothing that the backend does escapes."""
        return timed(lambda: self._guarded(case))

    def _guarded(self, case: Case) -> CellResult:
        try:
            return self._judge(case)
        except CheckFailure as failure:
            return self._failed(case, str(failure), failure.error, failure.tolerance)
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException as error:  # a kernel may raise anything, sys.exit included
            return self._failed(case, f"raised {raised(error)}")

    def _failed(self, case: Case, reason: str, *worst: float | None) -> CellResult:
        """A failure, and what the instance had run before."""
        return replace(self.result(case, "failed", reason, *worst), after=self._seat(case).drop())

    def _seat(self, case: Case) -> _Seat:
        if case.options not in self._seats:
            options = replace(self.target.options, **dict(case.options)) if case.options else self.target.options
            self._seats[case.options] = _Seat(replace(self.target, options=options))
        return self._seats[case.options]

    def _judge(self, case: Case) -> CellResult:
        if case.level != "L0":
            refusal = self._refusal(case)
            if refusal is not None:
                return self._refused(case, str(refusal))
        seat = self._seat(case)
        used = seat.instance.used
        try:
            with torch.inference_mode():
                context = Context(case, seat.instance)
                measure = CHECKS[case.check](context)
                if used and case.level != "L0" and (self.proof == "device" or case.cost <= CHEAP):
                    measure = measure.worse(self._on_a_fresh_instance(context))
        except Refused as refused:
            return self._refused_later(case, refused)
        except CannotJudge as missing:
            return self.result(case, "skipped", str(missing))
        if case.level != "L0":
            seat.before.append(case)
        return self.result(case, "passed", None, measure.error, measure.tolerance)

    def _on_a_fresh_instance(self, context: Context) -> Measure:
        """The case once more; what earlier cases left behind may have made it right."""
        try:
            return CHECKS[context.case.check](context.on(Instance(context.target)))
        except CheckFailure as failure:
            reason = f"on a fresh instance, though not on one that other cases used: {failure}"
            raise CheckFailure(reason, error=failure.error, tolerance=failure.tolerance) from failure

    def _refusal(self, case: Case) -> Refusal | None:
        """The first declared refusal of the case's layers, seen to happen in selection."""
        target = self._seat(case).target
        answers = [target.spec.unsupported(c.query(), target.options) for c in case.asked()]
        for answer in answers:
            well_formed(answer, f"unsupported for {case.id}")
        refusal = next((a for a in answers if a is not None), None)
        if refusal is not None:
            seen_to_refuse(target, case)
        return refusal

    def _refused(self, case: Case, reason: str) -> CellResult:
        result = self.result(case, "unsupported", reason)
        if not self.probe:
            return result
        # Kernels run only where no error can escape; one that is right was declared too modestly.
        instance = Instance(self._seat(case).target)
        try:
            with torch.inference_mode():
                CHECKS[case.check](Context(case, instance))
        except (KeyboardInterrupt, GeneratorExit):
            raise
        except BaseException:
            return result
        return CellResult(case, result.backend, "unsupported", self.proof, reason, understated=True)

    def _refused_later(self, case: Case, refused: Refused) -> CellResult:
        """Refused by the layouts or the plan: those too must refuse where an engine asks."""
        if refused.refusal.field in ("layouts", "block_size"):
            option_offered = case.layout or case.kernel_ratio > 1
            if not option_offered:
                seen_to_refuse(self._seat(case).target, case)
        return self.result(case, "unsupported", str(refused))

    def result(
        self,
        case: Case,
        outcome: Outcome,
        reason: str | None,
        error: float | None = None,
        tolerance: float | None = None,
    ) -> CellResult:
        """An outcome of this backend at this level of proof."""
        return CellResult(case, str(self.target.spec.name), outcome, self.proof, reason, error, tolerance)
