"""No green without a core profile: whatever a backend declares, some profile's cases must really run."""

import pytest

from kvcore.errors import BackendError, BackendUnavailableError, Refusal
from kvcore.registry.loader import installed
from kvcore.registry.registry import Registry
from kvcore.spec.layout import KernelBlocks, LayoutOption
from kvcore.testing import BackendConformance, CellResult, all_cases, conform, run
from kvcore.testing.cases.base import find_base, here, open_backend, smallest_block
from kvcore.testing.checks.runner import PROFILE, profile_served, selected

TorchSpec = installed().backend("torch")
TorchBackend = type(TorchSpec.create("cpu", TorchSpec.Config()))
SERVED = "L0.profile_served"


def raises(self, *args, **kwargs):
    raise RuntimeError("no kernel")


def spec_of(name="odd", *, blocks=None, kernels=None, **declared):
    """Torch with other kernel blocks a layout, other kernels, and other answers."""
    backend = type("Backend", (TorchBackend,), kernels or {})

    def layouts(cls, spec, facts, options):
        found = TorchSpec.layouts(spec, facts, TorchSpec.Config())
        sizes = blocks or [KernelBlocks(multiple_of=1)]
        return [LayoutOption(o.layout, sizes[min(i, len(sizes) - 1)]) for i, o in enumerate(found)]

    methods = {key: classmethod(value) for key, value in declared.items()}
    create = classmethod(lambda cls, device, options: backend(device, options))
    return type("Odd", (TorchSpec,), {"name": name, "layouts": classmethod(layouts), "create": create} | methods)


def base_of(spec):
    return find_base(open_backend(spec, None, here()).target)


def registry_of(*specs):
    found = Registry()
    found.backends.update({s.name: s for s in specs})
    return found


@pytest.mark.parametrize("sizes", [(48,), (96, 192), (2048,)])
def test_kernels_that_always_raise_are_found_at_any_block_size(sizes):
    """Sizes that the kit does not think of by itself: every case was refused, and the run was green."""
    blocks = [KernelBlocks(sizes=sizes)]
    results = run(spec_of(blocks=blocks, kernels={"write": raises, "attend": raises}), stop_at_first=True)
    assert results[-1].outcome == "failed"
    assert "no kernel" in results[-1].reason
    assert results[-1].case.block_size == sizes[0]


@pytest.mark.parametrize(
    ("blocks", "size"),
    [
        (KernelBlocks(multiple_of=1), 8),
        (KernelBlocks(multiple_of=3), 9),
        (KernelBlocks(multiple_of=16), 16),
        (KernelBlocks(multiple_of=256), 256),
        (KernelBlocks(sizes=(16, 32, 64)), 16),
        (KernelBlocks(sizes=(1, 2, 4)), 4),
        (KernelBlocks(sizes=(64, 48, 4)), 48),
        (KernelBlocks(sizes=(3000,)), 3000),
    ],
)
def test_the_base_is_a_declared_size(blocks, size):
    assert smallest_block(blocks) == size
    assert blocks.fit(size) == size
    assert base_of(spec_of(blocks=[blocks])).block_size == size


def test_a_backend_that_refuses_once_it_is_made():
    """The declaration was right when it was asked; no case ran."""
    made = []

    def create(cls, device, options):
        made.append(device)
        return TorchBackend(device, options)

    def unsupported(cls, query, options):
        late = Refusal("queries", query.dtype, "none any more")
        return late if made else TorchSpec.unsupported(query, options)

    results = run(spec_of(create=create, unsupported=unsupported), probe_refused=False)
    assert [r.case.id for r in results if r.case.seqs and r.outcome == "passed"] == ["L1.write.base.prefill"]
    (failed,) = [r for r in results if r.outcome == "failed"]
    assert failed.case.id == SERVED
    for profile in ("kv: L2.attend.base.", "encoder: L2.attend.mask=bidirectional", "latent: L2.attend.content"):
        assert profile in failed.reason
    assert "queries=float32 (allowed: none any more)" in failed.reason


def test_what_fails_says_so_itself():
    """The cell of the profile says that its cases ran, not that they are right."""
    spec = spec_of(kernels={"attend": raises})
    kv = [c for c in all_cases() if c.profile == "kv"]
    assert {c.phase for c in kv} == {"prefill", "decode"}
    assert [r.outcome for r in run(spec, [PROFILE])] == ["passed"]
    assert [r.outcome for r in run(spec, [*kv, PROFILE])] == ["failed", "failed", "passed"]


def test_one_refused_case_is_a_profile_that_is_not_served():
    """A prefill that runs, and a decode that is refused."""
    taken = CellResult(PROFILE, "odd", "passed", "device")
    target = open_backend(TorchSpec, None, here()).target

    def end(case):
        if case.profile == "kv" and case.phase == "prefill":
            return taken
        return CellResult(case, "odd", "unsupported", "device", "no")

    outcome, reason = profile_served(target, end)
    assert outcome == "failed"
    assert "kv: L2.attend.base.decode is unsupported, no" in reason


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_encoder_alone_is_enough(dtype):
    def unsupported(cls, query, options):
        if query.mask.causal:
            return Refusal("mask", "causal", "bidirectional")
        other = None if query.dtype == dtype else Refusal("dtype", query.dtype, dtype)
        return other or TorchSpec.unsupported(query, options)

    found = {r.case.id: r for r in run(spec_of(unsupported=unsupported), level="fast", probe_refused=False)}
    assert found[SERVED].outcome == "passed"
    assert [r.reason for r in found.values() if r.outcome == "failed"] == []
    held = [r for r in found.values() if r.case.profile == "encoder"]
    assert {(r.outcome, r.case.dtype) for r in held} == {("passed", dtype)}


def test_it_comes_with_the_whole_catalogue_alone():
    assert [c.id for c in selected("torch")][-1] == SERVED
    assert [r.case.id for r in run("torch", where={"sinks": "true", "phase": "mixed"}) if r.case == PROFILE] == []
    missing = spec_of(unavailable=lambda cls, options: "libkernel is missing")
    (result,) = run(missing, [PROFILE])
    assert (result.outcome, result.reason) == ("skipped", "libkernel is missing")


def test_where_everything_is_refused_no_case_could_run():
    def unsupported(cls, query, options):
        none = Refusal("sinks", True, "none") if query.sinks else None
        return none or TorchSpec.unsupported(query, options)

    modest = registry_of(spec_of("modest", unsupported=unsupported))
    with pytest.raises(BackendUnavailableError, match=r"no case could run: sinks=True \(allowed: none\)"):
        conform("modest", where={"sinks": "true", "phase": "decode", "context": "1-256"}, registry=modest)
    few = {"phase": "decode", "mask": "window", "heads": "1-16", "context": "1-256"}
    assert conform("modest", where=few, registry=modest).failed == []


def test_a_declaration_that_raises_is_a_typed_error():
    def exits(cls, *asked):
        raise SystemExit(7)

    for method in ("unavailable", "unsupported_device", "proof"):
        with pytest.raises(BackendError, match=r"the declaration raised SystemExit: 7 \(in exits"):
            open_backend(spec_of(**{method: exits}), None, here())
    for method in ("unsupported", "layouts"):
        with pytest.raises(BackendError, match="SystemExit: 7"):
            base_of(spec_of(**{method: exits}))
    assert [c.id for c in selected(spec_of(unsupported=exits))] == ["L0.contract"]


def test_options_that_exit_end_one_backend():
    class Exits:
        def __init__(self):
            raise SystemExit(7)

    spec = type("Exits", (TorchSpec,), {"name": "exits", "Config": Exits})
    done = conform("exits,torch", where={"phase": "mixed", "sinks": "true"}, registry=registry_of(spec, TorchSpec))
    assert {(r.backend, r.case.id) for r in done.failed} == {("exits", "L0.contract")}
    assert "SystemExit: 7" in done.failed[0].reason
    assert done.summary("torch")["passed"] > 0


@pytest.mark.parametrize("stop", [KeyboardInterrupt, GeneratorExit])
def test_an_interrupt_ends_the_run(stop):
    def interrupted(cls, *asked):
        raise stop

    for method in ("unavailable", "unsupported", "layouts", "proof"):
        with pytest.raises(stop):
            run(spec_of(**{method: interrupted}))


@pytest.mark.parametrize("answer", ["", "  ", True, 3])
def test_what_is_missing_has_a_reason(answer):
    spec = spec_of(unavailable=lambda cls, options: answer)
    (result,) = run(spec)
    assert (result.case.id, result.outcome) == ("L0.contract", "failed")
    assert f"unavailable answered {answer!r}, not None or a reason" in result.reason


def claimed(level="full", **blocks):
    base = base_of(spec_of(blocks=[KernelBlocks(**blocks)]))
    found = [c for c in all_cases(level, base) if "kernel_block=" in c.id]
    return {(c.level, c.phase, c.block_size) for c in found}


def test_every_declared_size_is_asked():
    steps = (("L1", "mixed"), ("L2", "decode"), ("L2", "mixed"))
    assert claimed(multiple_of=16) == {(*s, n) for s in steps for n in (272, 544)}
    assert claimed(multiple_of=1) == {(*s, n) for s in steps for n in (17, 34, 544)}
    assert claimed(multiple_of=24) == {(*s, n) for s in steps for n in (408, 816)}
    assert claimed(sizes=(16, 32, 96)) == {(*s, n) for s in steps for n in (32, 96)}
    assert claimed("quick", sizes=(16, 32, 96)) == {(*s, 32) for s in steps}
    assert claimed("quick", multiple_of=16) == set()


def test_a_layout_with_blocks_of_its_own_is_asked_in_them():
    def write(self, layer, tensors, cache, metadata):
        if cache["k"].shape[2 if cache["k"].shape[1] == 2 else 1] == 40:
            raise RuntimeError("no kernel for 40")
        TorchBackend.write(self, layer, tensors, cache, metadata)

    blocks = [KernelBlocks(sizes=(8,)), KernelBlocks(sizes=(40,))]
    spec = spec_of(blocks=blocks, kernels={"write": write})
    assert base_of(spec).kernel_blocks == ((8,), (40,))
    results = run(spec, where={"block_size": "40"}, probe_refused=False)
    assert {(r.case.layout, r.outcome) for r in results} == {(1, "failed")}
    assert {(r.case.level, r.case.phase) for r in results} == {("L1", "mixed"), ("L2", "mixed"), ("L2", "decode")}


def test_a_kernel_that_is_missing_at_544():
    """Any multiple of 16 is declared, and one page size has no kernel (A18)."""

    def attend(self, layer, query, cache, metadata, out, lse=None):
        if 544 in cache["k"].shape:
            raise RuntimeError("no kernel for pages of 544 tokens")
        TorchBackend.attend(self, layer, query, cache, metadata, out, lse)

    spec = spec_of(blocks=[KernelBlocks(multiple_of=16)], kernels={"attend": attend})
    results = run(spec, level="full", where={"block_size": "544"})
    # Whatever else its options are: what follows "@".
    assert {r.case.id.partition("@")[0] for r in results if r.outcome == "failed"} == {
        "L2.attend.kernel_block=544.decode",
        "L2.attend.kernel_block=544.mixed",
    }
    passed = {r.case.id.partition("@")[0] for r in results if r.outcome == "passed"}
    assert passed == {"L1.write.kernel_block=544.mixed"}


def test_an_empty_class_is_refused_where_pytest_collects():
    class Empty(BackendConformance):
        spec = TorchSpec
        where = {"window": "12345"}

    class Asked:
        fixturenames = ("kvcore_case",)

    with pytest.raises(Exception, match="no case was selected"):
        Empty.pytest_generate_tests(Asked())
