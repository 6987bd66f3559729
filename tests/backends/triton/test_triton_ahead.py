"""Static proof: variants compiled for devices that are not here; no spills, shared memory within limits."""

import json
import os
import re
import subprocess
import venv
from pathlib import Path

import pytest

pytest.importorskip("triton")

from backends.triton.core_kernels import SIGNATURES
from backends.triton.proof_set import pairs_of, proof_set, wanted_pairs
from kvcore_triton.ahead_of_time import Resources, compiled, resources
from kvcore_triton.targets import TARGETS, compile_options
from kvcore_triton.variants import DIMS, DTYPES, PROVEN, Variant, every

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "kernels.md"


def shown():
    """(version of Triton, resources by name of variant) that the page shows."""
    text = PAGE.read_text()
    rows = re.findall(r"^\| `((?:sm_|gfx)\S+)` \|([\d |]+)\|$", text, re.MULTILINE)
    found = {name: Resources(*(int(n) for n in numbers.split("|"))) for name, numbers in rows}
    return re.search(r"Compiled with triton (\S+),", text)[1], found


VERSION, ROWS = shown()


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Triton's own cache, for this session: nothing of another checkout counts as proof."""
    from triton import knobs

    with knobs.cache.scope():
        knobs.cache.dir = str(tmp_path_factory.getbasetemp() / "triton-cache")
        yield


def check(variant, resources):
    limit = TARGETS[variant.target].shared_bytes
    assert resources.shared_bytes <= limit, f"{variant.name} wants {resources.shared_bytes} of {limit} bytes"
    if variant.target.startswith("sm_"):
        assert resources.spilled_bytes == 0, f"{variant.name} spills {resources.spilled_bytes} bytes"
        assert resources.registers <= 255


def test_the_set_has_every_pair_and_stays_small():
    found = proof_set()
    assert len(found) <= 40
    assert len({v.name for v in found}) == len(found)
    rows = [
        {n: getattr(v, n) for n in ("target", "dtype", "stored", "granularity", "phase", "general")}
        | {"dims": (v.head_dim, v.head_dim_v)}
        for v in found
        if v.kernel == "attend"
    ]
    assert wanted_pairs() == {p for row in rows for p in pairs_of(row)} & wanted_pairs()


@pytest.mark.parametrize("variant", proof_set(), ids=lambda v: v.name)
def test_compiles_within_limits(variant):
    import triton

    found = compiled(variant)
    check(variant, found)
    if triton.__version__ == VERSION:
        assert found == ROWS.get(variant.name), "write the page's table anew: make_register_table.py"


def test_the_page_shows_this_set():
    """`python tests/backends/triton/make_register_table.py` writes the table anew."""
    assert set(ROWS) == {v.name for v in proof_set()}


@pytest.mark.parametrize("i", range(len(SIGNATURES)))
def test_the_kernels_of_the_core_compile(i):
    """What the core launches for tables, copies, zeros and plain writes, each on another target in turn."""
    from kvcore.memory.kernels import triton_kernels

    (kernel, types, constants), target = SIGNATURES[i], PROVEN[i % len(PROVEN)]
    found = resources(getattr(triton_kernels, kernel), types, constants, target, {"num_warps": 4})
    assert found.spilled_bytes == 0
    assert found.shared_bytes <= TARGETS[target].shared_bytes


def test_every_kernel_of_the_core_is_among_them():
    from kvcore.memory.kernels import triton_kernels

    launched = {n for n, x in vars(triton_kernels).items() if hasattr(x, "arg_names") and n != "slot_of"}
    assert launched == {kernel for kernel, *_ in SIGNATURES}
    for kernel, types, constants in SIGNATURES:
        assert {*types, *constants} == set(getattr(triton_kernels, kernel).arg_names)


@pytest.mark.parametrize("kernel", ["attend", "merge", "write"])
def test_no_value_makes_a_variant(kernel):
    """Whatever changes from step to step, layer to layer or model to model is not specialised."""
    from kvcore_triton.kernels.attention import attend_tiles, merge_splits
    from kvcore_triton.kernels.write import write_step

    jitted = {"attend": attend_tiles, "merge": merge_splits, "write": write_step}[kernel]
    special = {p.name for p in jitted.params if not p.is_constexpr and not p.do_not_specialize}
    ours = {"work_ptr", "merge_ptr", "partial_ptr", "partial_lse_ptr"}
    copied = {"q_ptr", "out_ptr", "k_ptr", "v_ptr", "k_field_ptr", "v_field_ptr"}
    assert special <= ours | copied


def test_an_oversized_tile_fails():
    """The check can fail: too many rows for the registers, too many keys for the shared memory."""
    rows = Variant("attend", "sm_90", "float16", head_dim=128, head_dim_v=128, phase="prefill")
    with pytest.raises(AssertionError, match="spills"):
        check(rows, compiled(rows, BLOCK_M=256, num_warps=4))
    keys = Variant("attend", "sm_120", "float16", head_dim=256, head_dim_v=256)
    with pytest.raises(AssertionError, match="wants"):
        check(keys, compiled(keys, BLOCK_N=128, num_stages=4))


def test_registers_are_limited_by_the_device_alone():
    """65,536 registers a processor, 255 a thread (CUDA C++ Programming Guide, compute capabilities)."""
    limits = {w: compile_options(TARGETS["sm_90"], w, 2)["maxnreg"] for w in (1, 4, 8, 16, 32)}
    assert limits == {1: 255, 4: 255, 8: 255, 16: 128, 32: 64}
    assert compile_options(TARGETS["gfx942"], 8, 2) == {"num_warps": 8, "num_stages": 2}


def test_a_launch_takes_the_options():
    """A launch refuses names that its compiler does not know."""
    from triton.backends.amd.compiler import HIPOptions
    from triton.backends.nvidia.compiler import CUDAOptions

    assert set(compile_options(TARGETS["sm_90"])) <= set(CUDAOptions.__dataclass_fields__)
    assert set(compile_options(TARGETS["gfx942"])) <= set(HIPOptions.__dataclass_fields__)


def test_types_that_a_target_lacks_are_no_variants():
    names = {v.name for v in every()}
    assert not any(n.startswith("sm_80") and "fp8_e4m3" in n for n in names)
    assert any(n.startswith("sm_80") and "fp8_e5m2" in n for n in names)
    fnuz = Variant("attend", "gfx942", stored="fp8_e4m3")
    assert fnuz.signature()[0]["k_ptr"] == "*fp8e4b8"
    assert Variant("attend", "sm_90", stored="fp8_e4m3").signature()[0]["k_ptr"] == "*fp8e4nv"


@pytest.mark.parametrize("kernel", ["attend", "merge", "write"])
def test_signatures_name_every_argument(kernel):
    """Types and constants together are exactly the kernel's parameters."""
    from kvcore_triton.kernels.attention import attend_tiles, merge_splits
    from kvcore_triton.kernels.write import write_step

    jitted = {"attend": attend_tiles, "merge": merge_splits, "write": write_step}[kernel]
    types, constants = Variant(kernel, "sm_90").signature()
    assert {*types, *constants} == set(jitted.arg_names)


@pytest.mark.long
@pytest.mark.parametrize("target", PROVEN)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_variant_compiles(target, dtype, dims):
    problems = []
    for variant in every((target,)):
        if variant.dtype == dtype and (variant.head_dim, variant.head_dim_v) == dims:
            try:
                check(variant, compiled(variant))
            except AssertionError as problem:
                problems.append(str(problem))
    assert not problems


@pytest.mark.long
def test_the_set_compiles_with_triton_3_6(tmp_path):
    """The release beside torch 2.11, in an environment of its own."""
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "triton==3.6.0"], check=True)
    # Compiling takes no torch, but Triton's host side looks for one; ours is the CPU build.
    import torch

    paths = [str(ROOT), str(ROOT / "backends"), str(ROOT / "tests"), str(Path(torch.__file__).parents[1])]
    code = f"""
import sys; sys.path += {paths!r}
import triton; assert triton.__version__ == "3.6.0", triton.__file__
import json
from backends.triton.proof_set import proof_set
from kvcore_triton.ahead_of_time import compiled
print(json.dumps({{v.name: compiled(v) for v in proof_set()}}))
"""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        [python, "-c", code],
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"TRITON_CACHE_DIR": str(tmp_path / "cache")},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert set(found) == {v.name for v in proof_set()}
    spilled = {n: r for n, r in found.items() if n.startswith("sm_") and r[1]}
    assert not spilled
