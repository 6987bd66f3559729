"""Whatever a backend does, the run goes on and ends in a clear outcome."""

import json
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from kvcore.errors import BackendUnavailableError, BackendUnsupportedError, ConfigError, Refusal, UnknownBackendError
from kvcore.registry.loader import installed
from kvcore.registry.registry import Registry
from kvcore.testing import all_cases, conform, run
from kvcore.testing.checks.runner import selected
from kvcore.testing.report.html import page
from kvcore.testing.report.table import text

TorchSpec = installed().backend("torch")
REFUSALS = [c for c in all_cases() if c.id == "L0.refusals"]
SOME = [c for c in all_cases() if c.id in ("L1.write.padding.mixed", "L2.attend.base.mixed", "L2.attend.base.decode")]


def liar(name="liar", *, declares=None, **methods):
    """The torch backend with some methods of its own, and a declaration with some attributes of its own."""

    class Backend(type(TorchSpec.create("cpu", TorchSpec.Config()))):
        pass

    for method, body in methods.items():
        setattr(Backend, method, body)

    def create(cls, device, options):
        return Backend(device, options)

    attributes = {"name": name, "create": classmethod(create), **(declares or {})}
    return type("Liar", (TorchSpec,), attributes)


def outcomes(spec, cases=SOME, **settings):
    found = run(spec, cases, **settings)
    assert len(found) == len(cases)
    return {r.case.id: (r.outcome, r.reason) for r in found}


def fails(spec, words, case="L2.attend.base.mixed"):
    outcome, reason = outcomes(spec)[case]
    assert outcome == "failed"
    assert words in reason


def attend_of(backend, *args, **kwargs):
    return super(type(backend), backend).attend(*args, **kwargs)


def test_layouts_may_refuse_by_name():
    """What a device lacks is known where the layouts are asked: a refusal, not a failure."""

    def layouts(cls, spec, facts, options):
        if getattr(spec.content, "dtype", "") == "fp8_e4m3":
            raise BackendUnsupportedError("no e4m3", field="cache_dtype", got="fp8_e4m3", allowed=["int8"])
        return super(cls.refusing, cls).layouts(spec, facts, options)

    spec = liar(declares={"layouts": classmethod(layouts)})
    spec.refusing = spec
    results = run(spec, level="fast") + run(spec, where={"cache_dtype": "fp8_e4m3", "context": "1-256"})
    assert not [(r.case.id, r.reason) for r in results if r.outcome == "failed"]
    refused = [r for r in results if r.outcome == "unsupported" and r.case.stored_dtype == "fp8_e4m3"]
    assert {r.reason for r in refused} == {"layouts=cache_dtype=fp8_e4m3 (allowed: ['int8'])"}
    assert "fp8_e4m3" not in {r.case.stored_dtype for r in results if r.outcome == "passed"}


def test_torch_passes():
    assert {o for o, _ in outcomes("torch").values()} == {"passed"}


@pytest.mark.parametrize(
    "error",
    [RuntimeError("boom"), MemoryError("no room"), SystemExit(3), ZeroDivisionError(), torch.OutOfMemoryError("x")],
)
def test_one_that_raises_in_a_kernel(error):
    def attend(self, *args, **kwargs):
        raise error

    found = outcomes(liar(attend=attend))
    assert found["L1.write.padding.mixed"][0] == "passed"
    assert found["L2.attend.base.mixed"][0] == "failed"
    assert type(error).__name__ in found["L2.attend.base.mixed"][1]
    assert "test_outcomes.py" in found["L2.attend.base.mixed"][1]


def test_one_that_returns_its_result():
    def attend(self, layer, query, cache, metadata, out, lse=None):
        return torch.zeros(out.shape[0], 3)

    fails(liar(attend=attend), "belongs into `out`")


def test_one_that_changes_the_shape_of_the_result():
    def attend(self, layer, query, cache, metadata, out, lse=None):
        out.resize_(out.shape[0], 1)

    fails(liar(attend=attend), "")


def test_one_that_changes_the_dtype_of_the_result():
    def attend(self, layer, query, cache, metadata, out, lse=None):
        out.data = out.data.to(torch.float16)

    fails(liar(attend=attend), "")


def test_one_that_writes_nothing():
    fails(liar(attend=lambda self, *a, **k: None), "is nan")


def test_one_that_writes_around_the_result():
    def attend(self, layer, query, cache, metadata, out, lse=None):
        attend_of(self, layer, query, cache, metadata, out, lse)
        out.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0)

    fails(liar(attend=attend), "outside `out`")


def test_one_that_writes_into_the_null_block():
    def write(self, layer, tensors, cache, metadata):
        super(type(self), self).write(layer, tensors, cache, metadata)
        cache["k"][0, 0, 0, 0] = 1

    fails(liar(write=write), "null block")


def test_one_that_writes_while_it_reads():
    def attend(self, layer, query, cache, metadata, out, lse=None):
        attend_of(self, layer, query, cache, metadata, out, lse)
        cache["v"][-1, 0, 0, 0] = 1

    fails(liar(attend=attend), "attend changed the cache")


def test_one_that_scribbles_on_the_queries():
    def attend(self, layer, query, cache, metadata, out, lse=None):
        attend_of(self, layer, query, cache, metadata, out, lse)
        query["q"].mul_(2)

    fails(liar(attend=attend), "changed the queries")


def test_one_whose_factory_gives_something_else():
    fails(liar(declares={"create": classmethod(lambda cls, device, options: object())}), "no method prepare")


def test_one_without_its_library():
    gone = {"unavailable": classmethod(lambda cls, options: "libkernel is missing; pip install libkernel")}
    found = outcomes(liar(declares=gone))
    assert set(found.values()) == {("skipped", "libkernel is missing; pip install libkernel")}


def test_one_without_its_device():
    no = {"unsupported_device": classmethod(lambda cls, facts, options: Refusal("device", facts.kind, ["npu"]))}
    assert {o for o, _ in outcomes(liar(declares=no)).values()} == {"skipped"}


def test_one_of_contract_version_2():
    (result,) = run(liar(declares={"api_version": 2}))
    assert (result.outcome, result.case.id) == ("failed", "L0.contract")
    assert "version 2" in result.reason
    assert "speaks 1" in result.reason


def test_one_whose_declaration_raises():
    def unsupported(cls, query, options):
        raise KeyError("oops")

    (result, *_) = run(liar(declares={"unsupported": classmethod(unsupported)}))
    assert result.outcome == "failed"
    assert "KeyError" in result.reason


def test_a_feature_that_is_accepted_and_ignored():
    def attend(self, layer, query, cache, metadata, out, lse=None):
        from dataclasses import replace

        without = replace(layer, query=replace(layer.query, sinks=False), sinks=None)
        attend_of(self, without, query, cache, metadata, out, lse)

    case = next(c for c in all_cases() if c.id.startswith("L2.attend.sinks=true"))
    (result,) = run(liar(attend=attend), [case])
    assert result.outcome == "failed"
    assert "without sinks: accepted and ignored" in result.reason


def test_a_refused_feature_that_works_is_understated():
    def unsupported(cls, query, options):
        return Refusal("softcap", query.softcap, "none") if query.softcap else None

    modest = liar(declares={"unsupported": classmethod(unsupported)})
    case = next(c for c in all_cases() if c.id.startswith("L2.attend.softcap=1.5"))
    (result,) = run(modest, [case])
    assert (result.outcome, result.understated) == ("unsupported", True)
    (result,) = run(modest, [case], probe_refused=False)
    assert (result.outcome, result.understated) == ("unsupported", False)


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda q: "no sinks here", "not None or Refusal"),
        (lambda q: Refusal("", q.sinks, "none"), "names no field"),
        (lambda q: Refusal("sinks", q.sinks, None), "what is allowed"),
    ],
)
def test_a_refusal_that_says_too_little(answer, words):
    declares = {"unsupported": classmethod(lambda cls, q, options: answer(q) if q.sinks else None)}
    case = next(c for c in all_cases() if c.id.startswith("L2.attend.sinks=true"))
    (result,) = run(liar(declares=declares), [case])
    assert result.outcome == "failed"
    assert words in result.reason
    assert words in run(liar(declares=declares), REFUSALS)[0].reason


def test_a_refused_block_size_is_unsupported():
    from kvcore.spec.layout import KernelBlocks, LayoutOption

    def layouts(cls, spec, facts, options):
        found = TorchSpec.layouts(spec, facts, options)
        return [LayoutOption(o.layout, KernelBlocks(sizes=(8, 16))) for o in found]

    spec = liar(declares={"layouts": classmethod(layouts)})
    cases = selected(spec, level="fast") + [c for c in selected(spec) if "block_size=" in c.id]
    found = {r.case.id: r for r in run(spec, cases)}
    assert [r.case.id for r in found.values() if r.outcome == "failed"] == []
    assert found["L2.attend.block_size=1.mixed"].outcome == "unsupported"
    assert "8 or 16" in found["L2.attend.block_size=1.mixed"].reason


@dataclass(frozen=True)
class StandIn:
    interpret: bool = False
    emulate: bool = False


@pytest.mark.parametrize(
    ("order", "proof", "proven"), [(("interpret", "emulate"), "interpreter", True), (("emulate",), "emulated", False)]
)
def test_stand_ins_are_switched_on_and_marked(order, proof, proven):
    proofs = {"interpret": "interpreter", "emulate": "emulated"}

    def unsupported_device(cls, facts, options):
        ready = facts.kind == "cuda" or options.interpret or options.emulate
        return None if ready else Refusal("device", facts.kind, ["cuda"])

    spec = liar(
        declares={
            "Config": StandIn,
            "stand_ins": {n: proofs[n] for n in order},
            "unsupported_device": classmethod(unsupported_device),
            "layouts": classmethod(lambda cls, s, f, o: TorchSpec.layouts(s, f, TorchSpec.Config())),
        }
    )
    found = run(spec, SOME)
    assert {(r.outcome, r.proof, r.proven) for r in found} == {("passed", proof, proven)}
    with_mine = Registry()
    with_mine.backends.update({"liar": spec, "torch": TorchSpec})
    few = {"phase": "decode", "sinks": "true", "context": "1-256", "heads": "1-16"}
    done = conform("all", where=few, registry=with_mine)
    assert ("ran(emulated)" in text(done)) is not proven
    assert {c["proven"] for c in done.as_dict()["matrix"] if c["backend"] == "liar"} == {proven}


def one_bad():
    def attend(self, layer, query, cache, metadata, out, lse=None):
        attend_of(self, layer, query, cache, metadata, out, lse)
        out.mul_(1.001)

    registry = Registry()
    registry.backends.update({"bad": liar("bad", attend=attend), "torch": TorchSpec})
    registry.refused["old"] = "backend old speaks contract version 2, this core speaks 1"
    return registry


def test_the_run_goes_on_and_the_report_says_it_all(capsys):
    few = {"mask": "causal", "phase": "mixed", "head_dim": "32", "head_dim_v": "32", "gqa": "2", "context": "1-256"}
    few |= {"sequences": "1-8", "rows": "2-64", "cache_dtype": "float32", "heads": "1-16", "blocks": "1-64"}
    done = conform("all", where=few, registry=one_bad())
    document = json.loads(json.dumps(done.as_dict()))
    assert {b["name"] for b in document["backends"]} == {"bad", "old", "torch"}
    assert document["backends"][1]["summary"] == {"passed": 0, "failed": 1, "unsupported": 0, "skipped": 0}
    assert document["backends"][2]["summary"]["failed"] == 0
    assert document["backends"][2]["proof"] == ["device"]
    assert set(document["matrix"][0]) >= {"feature", "value", "backend", "outcome", "proof"}
    assert set(document["cases"][0]) >= {
        "id",
        "backend",
        "level",
        "proof",
        "outcome",
        "reason",
        "max_abs_error",
        "tolerance",
        "understated",
    }
    shown = text(done)
    assert "contract version 2" in shown
    assert "FAILED bad L2.attend.base.mixed" in shown
    html = page(done)
    assert "<table>" in html
    assert "http" not in html
    assert "src=" not in html
    # The reproducer is smaller than any case of the catalogue, and fails in the same way.
    assert "# Liar is " in done.reproducer
    exec(done.reproducer, {"Liar": one_bad().backends["bad"]})
    said = capsys.readouterr().out
    assert said.startswith("failed")
    assert done.reproducer.count("Seq(") == 1


def test_no_case_is_an_error():
    with pytest.raises(ConfigError, match="no case was selected"):
        conform("torch", where={"window": "12345"})
    with pytest.raises(ConfigError, match="no axis"):
        conform("torch", where={"colour": "red"})
    with pytest.raises(UnknownBackendError):
        conform("nobody")
    gone = {"unavailable": classmethod(lambda cls, options: "not here")}
    registry = Registry()
    registry.backends["liar"] = liar(declares=gone)
    with pytest.raises(BackendUnavailableError, match="not here"):
        conform("liar", registry=registry)


def test_the_kit_imports_no_torch_until_it_runs():
    code = (
        "import sys, kvcore.testing as t, kvcore.testing.pytest_plugin, kvcore.testing.suite; "
        "t.BackendConformance, t.Case, t.all_cases; t.all_cases('full'); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
