"""Contracts with the really installed packages: every keyword that we pass exists, every argument is counted.

No emulation takes part: parameters, call sites and C++ sources are the packages' own.
"""

import ast
import inspect
import re
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import flashinfer
import pytest
from backends.flash.flash_cases import case
from kvcore_flash_attn import library as fa_library
from kvcore_flash_attn.declaration import FlashAttnBackendSpec, FlashAttnOptions
from kvcore_flash_attn.emulation import extension, load_interface
from kvcore_flash_attn.variants import FA2
from kvcore_flashinfer import library as fi_library
from kvcore_flashinfer.declaration import CUDA_CORE_GROUPS, FlashInferBackendSpec, FlashInferOptions
from kvcore_flashinfer.emulation import modules

from kvcore.errors import BackendUnavailableError
from kvcore.registry.signatures import missing_parameters
from kvcore.testing import run

SOURCES = Path(flashinfer.__file__).parent / "data"


def test_the_versions_that_these_contracts_are_about():
    assert version("flash-attn") == "2.8.3.post2"
    assert version("flashinfer-python") in ("0.6.13", "0.7.4")


@pytest.mark.parametrize("name", FA2.keywords)
def test_flash_attn_takes_every_keyword(name):
    assert missing_parameters(getattr(load_interface(FA2), name), FA2.keywords[name]) == []


@pytest.mark.parametrize(("wrapper", "method"), [(w, m) for w, methods in fi_library.KEYWORDS.items() for m in methods])
def test_flashinfer_takes_every_keyword(wrapper, method):
    function = fi_library.told(getattr(flashinfer, wrapper), method)
    assert missing_parameters(function, fi_library.KEYWORDS[wrapper][method]) == []


def renamed(function, old):
    """A function whose parameter `old` has another name now."""

    def stand_in(*arguments, **keywords):
        return function(*arguments, **keywords)

    parameters = [
        p.replace(name=f"{p.name}_renamed") if p.name == old else p
        for p in inspect.signature(function).parameters.values()
    ]
    stand_in.__signature__ = inspect.Signature(parameters)
    return stand_in


@pytest.mark.parametrize(("name", "parameter"), [(n, p) for n, parameters in FA2.keywords.items() for p in parameters])
def test_a_renamed_parameter_of_flash_attn_is_an_error_that_names_it(name, parameter):
    real = load_interface(FA2)
    functions = {n: getattr(real, n) for n in FA2.keywords}
    functions[name] = renamed(functions[name], parameter)
    with pytest.raises(BackendUnavailableError, match=rf"passes {parameter} to {name}"):
        fa_library.bind(SimpleNamespace(**functions), FlashAttnOptions(), "flash-attn x.y")


@pytest.mark.parametrize(
    ("wrapper", "method", "parameter"),
    [(w, m, p) for w, methods in fi_library.KEYWORDS.items() for m, ps in methods.items() for p in ps],
)
def test_a_renamed_parameter_of_flashinfer_is_an_error_that_names_it(wrapper, method, parameter):
    classes = {name: getattr(flashinfer, name) for name in fi_library.KEYWORDS}
    broken = type("Broken", (classes[wrapper],), {})
    behind = f"_{method}_impl" if hasattr(broken, f"_{method}_impl") else method
    setattr(broken, behind, renamed(getattr(broken, behind), parameter))
    with pytest.raises(BackendUnavailableError, match=rf"passes {parameter} to {wrapper}.{method}"):
        fi_library.bind(SimpleNamespace(**classes | {wrapper: broken}), "flashinfer-python x.y")


def test_a_plan_that_takes_anything_is_asked_behind_its_back():
    """From 0.7 on `plan` is blind; what it hands to is not."""

    class Later(flashinfer.BatchDecodeWithPagedKVCacheWrapper):
        def plan(self, *arguments, **keywords):
            return self._plan_impl(*arguments, **keywords)

        def _plan_impl(self, indptr, indices, last_page_len, *, window_left=-1):
            pass

    assert missing_parameters(Later.plan, ["indptr"]) == ["indptr"]
    assert missing_parameters(fi_library.told(Later, "plan"), ["indptr", "window_left", "sm_scale"]) == ["sm_scale"]


def test_a_missing_function_is_named():
    with pytest.raises(BackendUnavailableError, match="has no flash_attn_with_kvcache"):
        fa_library.bind(SimpleNamespace(), FlashAttnOptions(), "flash-attn x.y")
    with pytest.raises(BackendUnavailableError, match="has no BatchDecodeWithPagedKVCacheWrapper"):
        fi_library.bind(SimpleNamespace(), "flashinfer-python x.y")


def test_what_is_passed_is_what_was_declared(monkeypatch):
    """No keyword is passed that start-up did not ask for, and none is asked for that is not passed."""
    passed = {}

    def spy(owner, name, shown):
        real = getattr(owner, name)

        def recording(*arguments, **keywords):
            passed.setdefault(shown, set()).update(keywords)
            return real(*arguments, **keywords)

        # The signature stays, so that start-up finds what it looks for.
        recording.__signature__ = inspect.signature(real)
        monkeypatch.setattr(owner, name, recording)

    for name in FA2.keywords:
        spy(load_interface(FA2), name, name)
    for wrapper, methods in fi_library.KEYWORDS.items():
        for method in methods:
            spy(getattr(flashinfer, wrapper), method, f"{wrapper}.{method}")
    for backend, page in (("flash_attn", 256), ("flashinfer", 16)):
        for phase in ("mixed", "chunked"):
            (result,) = run(backend, [case("spied", phase, page, lse=True)])
            assert result.outcome == "passed", result.reason
    declared = {n: set(ps) for n, ps in FA2.keywords.items()}
    for wrapper, methods in fi_library.KEYWORDS.items():
        declared |= {f"{wrapper}.{m}": set(ps) for m, ps in methods.items()}
    assert {n: ps & declared[n] for n, ps in passed.items()} == declared
    # 0.7's wrappers call their own methods with more.
    outside = {n: ps - declared[n] for n, ps in passed.items() if ps - declared[n]}
    assert outside == {} or version("flashinfer-python") != "0.6.13"


@pytest.mark.parametrize("entry", ["varlen_fwd", "fwd_kvcache"])
def test_the_emulated_extension_takes_what_flash_attn_passes(entry):
    source = Path(load_interface(FA2).__file__).read_text()
    (call,) = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == f"flash_attn_gpu.{entry}"
    ]
    parameters = list(inspect.signature(getattr(extension, entry)).parameters)
    assert len(call.args) == len(parameters) == {"varlen_fwd": 21, "fwd_kvcache": 20}[entry]
    # Where an argument is a plain name, it is the name that the emulation gives to that place.
    plain = [(a.id, p.rstrip("_")) for a, p in zip(call.args, parameters, strict=True) if isinstance(a, ast.Name)]
    alike = {
        ("k_cache", "kcache"),
        ("v_cache", "vcache"),
        ("cache_seqlens", "seqlens_k"),
        ("causal", "is_causal"),
        ("cache_leftpad", "leftpad_k"),
        ("dropout_p", "p_dropout"),
        ("rotary_interleaved", "is_rotary_interleaved"),
    }
    assert all(a == p or (a, p) in alike for a, p in plain), plain


def cpp_parameters(file, function):
    """Names of a C++ function's parameters, those of a macro at its end left out."""
    source = SOURCES / "csrc" / f"{file}_jit_binding.cu"
    found = re.search(rf"{function}\((.*?)\)\s*;", source.read_text(), re.DOTALL)
    text = found[1].replace("ADDITIONAL_FUNC_PARAMS", "")
    return [re.sub(r"\s*=.*", "", part).split()[-1] for part in text.split(",")]


@pytest.mark.parametrize(
    ("file", "function", "entry", "additional"),
    [
        ("batch_decode", "BatchDecodeWithPagedKVCachePlan", modules.DecodeModule.plan, 0),
        ("batch_decode", "BatchDecodeWithPagedKVCacheRun", modules.DecodeModule.run, 5),
        ("batch_prefill", "BatchPrefillWithPagedKVCacheRun", modules.PrefillModule.paged_run, 13),
    ],
)
def test_the_emulated_modules_have_the_parameters_of_the_cpp(file, function, entry, additional):
    mine = list(inspect.signature(entry).parameters)[1:]
    theirs = cpp_parameters(file, function)
    assert len(mine) == len(theirs) + additional
    assert theirs[-1] in (mine[len(theirs) - 1], "empty_kv_data", "enable_pdl")


def test_the_emulated_prefill_plan_has_the_parameters_of_the_cpp():
    theirs = cpp_parameters("batch_prefill", "BatchPrefillWithKVCachePlan")
    mine = list(inspect.signature(modules.PrefillModule.plan).parameters)[1:]
    later = ["uniform_q_len", "fixed_uniform_q_len"]
    assert len(theirs) == len(mine) + (len(later) if theirs[-2:] == later else 0)


def test_the_group_sizes_of_the_cuda_core_decode():
    text = (SOURCES / "include" / "flashinfer" / "utils.cuh").read_text()
    macro = text[text.index("#define DISPATCH_GQA_GROUP_SIZE") :].split("#define")[1]
    found = {int(n) for n in re.findall(r"group_size == (\d+)", macro)}
    assert set(CUDA_CORE_GROUPS) <= found
    assert set(modules.GROUPS) <= found
    assert 5 not in found


@pytest.mark.parametrize(
    ("spec", "options", "package"),
    [
        (FlashAttnBackendSpec, FlashAttnOptions, "flash-attn"),
        (FlashInferBackendSpec, FlashInferOptions, "flashinfer-python"),
    ],
)
def test_a_missing_package_is_said_with_the_line_that_mends_it(monkeypatch, spec, options, package):
    module = inspect.getmodule(spec)

    def gone(name):
        raise module.PackageNotFoundError(name)

    monkeypatch.setattr(module, "version", gone)
    reason = spec.unavailable(options(emulate=True))
    assert f"{package} is not installed; pip install" in reason
    with pytest.raises(BackendUnavailableError, match="pip install"):
        spec.create("cpu", options(emulate=True))


@pytest.mark.parametrize(
    ("spec", "options", "wrong"),
    [
        (FlashAttnBackendSpec, FlashAttnOptions, "2.7.4"),
        (FlashAttnBackendSpec, FlashAttnOptions, "4.0.0b36"),
        (FlashInferBackendSpec, FlashInferOptions, "0.6.5"),
        (FlashInferBackendSpec, FlashInferOptions, "0.7.0.post1"),
        (FlashInferBackendSpec, FlashInferOptions, "0.8.0"),
    ],
)
def test_versions_that_were_never_tried_are_refused(monkeypatch, spec, options, wrong):
    monkeypatch.setattr(inspect.getmodule(spec), "version", lambda name: wrong)
    assert f"{wrong} is installed" in spec.unavailable(options(emulate=True))


@pytest.mark.skipif(find_spec("flash_attn_2_cuda") is not None, reason="the real kernels are here")
def test_flash_attn_without_its_kernels_is_unavailable():
    """The pure-Python install of the tests is no FlashAttention."""
    reason = FlashAttnBackendSpec.unavailable(FlashAttnOptions())
    assert "flash_attn_2_cuda" in reason
    assert "pip install --no-build-isolation flash-attn" in reason
    with pytest.raises(BackendUnavailableError, match="flash_attn_2_cuda"):
        FlashAttnBackendSpec.create("cpu", FlashAttnOptions())


def test_the_amd_switch_is_refused(monkeypatch):
    """With it flash_attn takes a block table and ignores it."""
    monkeypatch.setenv("FLASH_ATTENTION_TRITON_AMD_ENABLE", "TRUE")
    assert "ignore block tables" in FlashAttnBackendSpec.unavailable(FlashAttnOptions(emulate=True))
