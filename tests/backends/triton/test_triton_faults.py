"""Faults planted in the Triton kernels themselves: the kit's interpreter run kills every one."""

import os
import signal
import subprocess
import sys

import pytest
from backends.triton.planted import fault
from kvcore_triton.kernels import attention, write

from kvcore.attention.declaration import DeviceFacts
from kvcore.testing import all_cases, run
from kvcore.testing.cases.case import Base

pytest.importorskip("triton")
CPU = DeviceFacts("cpu")
CASES = {c.id: c for c in all_cases("full", Base("float32", 32, 16))}

# name -> (module, what stands there, what is put there, the case that must fail)
FAULTS = {
    "no causal mask": (
        attention,
        "tl.minimum(position + right, chunk_start + chunk)",
        "chunk_start + chunk",
        "L2.attend.base.prefill",
    ),
    "window one too long": (
        attention,
        "position - window + 1, chunk_start)",
        "position - window, chunk_start)",
        "L2.attend.window=P.mixed",
    ),
    "no chunk": (attention, "position // chunk * chunk", "position * 0", "L2.attend.chunk=P+3.chunked"),
    "keys past the end": (attention, "key_ok = key < end", "key_ok = key >= 0", "L2.attend.base.decode"),
    "values of hidden keys multiplied": (
        attention,
        "key_ok = key < end\n        local = key - start\n",
        "local = key - start\n        key_ok = local // block_size * block_size < keys_end - start\n",
        "L3.attend.poison=nan.causal.mixed",
    ),
    "partial results joined without weights": (
        attention,
        "acc * shrink[:, None] + out * weight[:, None]",
        "acc * shrink[:, None] + out",
        "L2.attend.base.decode",
    ),
    "peak forgotten in the merge": (
        attention,
        "        top = tl.maximum(peak, lse)\n",
        "        top = peak * 0 + 1e-6\n",
        "L4.attend.lse.softcap.decode",
    ),
    "sink lost where keys are split": (
        attention,
        '    sink = tl.load(sinks_ptr + head, mask=row_ok, other=float("-inf")) * LOG2E\n    peak',
        '    sink = tl.full([BLOCK_M], float("-inf"), tl.float32)\n    peak',
        "L2.attend.sinks=true.decode",
    ),
    "sink lost": (attention, "total * shrink + tl.exp2(sink - safe)", "total * shrink", "L2.attend.sinks=true.prefill"),
    "scale by shape": (
        attention,
        "factor, v_factor = scale, 1.0",
        "factor, v_factor = D**-0.5, 1.0",
        "L2.attend.scale=0.3.prefill",
    ),
    "scale after the soft-cap": (
        attention,
        "score = capped(score, softcap)",
        "score = capped(score / factor, softcap) * factor",
        "L2.attend.softcap=1.5.prefill",
    ),
    "alibi by key alone": (
        attention,
        "tl.abs(position[:, None] - key[None, :])",
        "(position[:, None] * 0 + key[None, :])",
        "L2.attend.alibi=true.prefill",
    ),
    "heads of the wrong KV head": (
        attention,
        "head = r // heads, kv_head * group + in_group",
        "head = r // heads, in_group * tl.num_programs(1) + kv_head",
        "L2.attend.gqa=3.chunked",
    ),
    "log-sum-exp in base 2": (
        attention,
        "tl.where(total > 0, total, 1.0))) * LN2",
        "tl.where(total > 0, total, 1.0)))",
        "L4.attend.lse.base.mixed",
    ),
    "scale of the key's neighbour": (
        attention,
        "offset * v_scale_token",
        "(offset ^ 1) * v_scale_token",
        "L2.attend.cache_dtype=int8_token_head.scale=1.0.decode",
    ),
    "one scale for all heads": (
        attention,
        "tl.load(v_scale_ptr + kv_head * v_scale_head)",
        "tl.load(v_scale_ptr)",
        "L2.attend.cache_dtype=fp8_e5m2_head.scale=1.0.decode",
    ),
    "padding written": (
        write,
        "slot = tl.load(slots_ptr + token)",
        "slot = tl.maximum(tl.load(slots_ptr + token), 0)",
        "L1.write.padding.mixed",
    ),
    "codes cut off": (
        write,
        "+ ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)",
        "+ 0",
        "L1.write.cache_dtype=fp8_e4m3_tensor.scale=0.3.mixed",
    ),
    "no saturation": (
        write,
        "tl.minimum(tl.abs(value), TOP)",
        "tl.abs(value)",
        "L1.write.cache_dtype=fp8_e4m3_tensor.saturate.mixed",
    ),
    "scales of a block apart": (
        write,
        "scale_ptr + block * scale_block + offset",
        "scale_ptr + block * scale_block * 0 + offset",
        "L1.write.cache_dtype=int8_token_head.packed.mixed",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_kit_kills_it(name, tmp_path):
    module, old, new, case = FAULTS[name]
    with fault(module, old, new, tmp_path):
        (result,) = run("triton", [CASES[case]], facts=CPU)
    assert (result.outcome, result.proof) == ("failed", "interpreter"), result.reason


OFFSETS = "L3.offsets.offsets>2^31.decode"
IN_ANOTHER_PROCESS = f"""
import sys, tempfile
from pathlib import Path
from backends.triton.planted import fault
from kvcore_triton.kernels import attention
from kvcore.attention.declaration import DeviceFacts
from kvcore.testing import all_cases, run
from kvcore.testing.cases.case import Base
case = next(c for c in all_cases("full", Base("float32", 32, 16)) if c.id == {OFFSETS!r})
old = "kv_head * k_head) * CACHE_UNIT"
with tempfile.TemporaryDirectory() as folder, fault(attention, old, sys.argv[1], Path(folder)):
    (result,) = run("triton", [case], facts=DeviceFacts("cpu"))
print(result.outcome)
"""


@pytest.mark.parametrize(
    ("put", "ends"),
    [
        ("kv_head * k_head).to(tl.int32) * CACHE_UNIT", ("failed", "killed")),
        ("kv_head * k_head) * CACHE_UNIT", ("passed",)),
    ],
)
def test_32_bit_offsets_are_killed(put, ends):
    """They read memory that is not ours: the run fails, or its process dies of a segmentation fault."""
    done = subprocess.run(
        [sys.executable, "-c", IN_ANOTHER_PROCESS, put],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )
    end = "killed" if done.returncode == -signal.SIGSEGV else done.stdout.strip()
    assert end in ends, done.stderr[-2000:]


@pytest.mark.long
@pytest.mark.parametrize("case", sorted({c for *_, c in FAULTS.values()}))
def test_and_without_it_passes(case):
    (result,) = run("triton", [CASES[case]], facts=CPU)
    assert (result.outcome, result.proof) == ("passed", "interpreter"), result.reason
