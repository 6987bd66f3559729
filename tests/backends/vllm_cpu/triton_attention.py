"""vLLM's Triton attention as a backend for tests: its own Python and kernel, interpreted on the host.

vLLM's backend file (`v1/attention/backends/triton_attn.py`) imports half of vLLM and cannot stand alone; and without
a GPU's driver vLLM replaces `triton.jit` by nothing at all. The file that matters, `ops/triton_unified_attention.py`,
asks five neighbours for seven names. They are stood in for here while it is loaded, and Triton's interpreter runs the
kernel. Cache writes go through the core: vLLM's ask the GPU for its generation.
"""

import importlib.util
import json
import logging
import sys
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch

from kvcore.backend import (
    AttentionBackend,
    BackendSpec,
    Capabilities,
    GroupBatch,
    KernelBlocks,
    KVHeads,
    LayoutOption,
    Refusal,
    SlotWriter,
    nhd,
)
from kvcore.testing import Case, Seq, run

OPS = "vllm.v1.attention.ops"
FILES = ("triton_attention_helpers", "triton_unified_attention")
CAPABILITIES = Capabilities(
    contents=("kv",),
    # Triton's interpreter multiplies bfloat16 as if it were an integer.
    dtypes=("float32", "float16"),
    features=("window", "scale", "softcap", "alibi", "sinks", "bidirectional"),
    head_dims=range(32, 257),
)

# What it gets wrong in 0.32: combinations that vLLM itself never asks of this kernel.
WRONG = {
    # The window has a left bound alone.
    "bidirectional window": Refusal("window", True, "causal masks"),
    # The bias is slope * (j - context), not -slope * |i - j| ...
    "bidirectional alibi": Refusal("alibi", True, "causal masks"),
    # ... and a constant of the row too high, which a softmax forgives and a sink does not.
    "alibi with sinks": Refusal("sinks", True, "no ALiBi"),
}


def wrong(name, query):
    """Whether a query asks for a combination of `WRONG`."""
    return {
        "bidirectional window": not query.mask.causal and query.mask.window is not None,
        "bidirectional alibi": not query.mask.causal and query.alibi,
        "alibi with sinks": query.alibi and query.sinks,
    }[name]


@cache
def unified_attention(folder):
    """vLLM's function; `TRITON_INTERPRET=1` must have been set when Triton was imported.

    Args:
        folder: Of the installed package `vllm`, which is not imported.
    """
    import triton

    stood_in = {
        "vllm": {},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.logger": {"init_logger": logging.getLogger},
        "vllm.platforms": {
            "current_platform": SimpleNamespace(
                fp8_dtype=lambda: torch.float8_e4m3fn, is_device_capability_family=lambda family: False
            )
        },
        "vllm.triton_utils": {"triton": triton, "tl": triton.language},
        "vllm.v1": {},
        "vllm.v1.kv_cache_interface": {"KVQuantMode": SimpleNamespace(**QUANT_MODES)},
        "vllm.v1.attention": {},
        OPS: {},
    }
    before = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "vllm"}
    try:
        for name, names in stood_in.items():
            sys.modules[name] = ModuleType(name)
            vars(sys.modules[name]).update(names)
        for file in FILES:
            path = folder / "v1" / "attention" / "ops" / f"{file}.py"
            spec = importlib.util.spec_from_file_location(f"{OPS}.{file}", path)
            module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.modules.update(before)
    return module.unified_attention


QUANT_MODES = {"NONE": 0, "INT8_PER_TOKEN_HEAD": 2, "FP8_PER_TOKEN_HEAD": 3, "INT4_PER_TOKEN_HEAD": 4}


class Tables(NamedTuple):
    """What a step is."""

    batch: object
    part: GroupBatch
    writer: SlotWriter


class VllmTriton(AttentionBackend):
    """One call a step, as `TritonAttentionImpl.forward` makes it."""

    def __init__(self, folder):
        self.attend_all = unified_attention(folder)

    def prepare(self, batch, group):
        part = batch.groups[group.kv_group]
        return Tables(batch, part, SlotWriter(part.slot_mapping_T, group.layout))

    def write(self, layer, tensors, cache, metadata):
        metadata.writer.write({name: tensors[name] for name in ("k", "v")}, cache)

    def attend(self, layer, query, cache, metadata, out, lse=None):
        facts, (batch, part, _) = layer.query, metadata
        before, after = facts.mask.keys_before, facts.mask.keys_after
        self.attend_all(
            q=query["q"],
            k=cache["k"],
            v=cache["v"],
            out=out,
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            seqused_k=part.kv_lens,
            max_seqlen_k=part.max_kv_len,
            softmax_scale=facts.softmax_scale,
            causal=facts.mask.causal,
            window_size=(-1, -1) if before is None else (before, after),
            block_table=part.block_table_SN,
            softcap=facts.softcap or 0.0,
            q_descale=None,
            k_descale=None,
            v_descale=None,
            alibi_slopes=layer.alibi_slopes,
            sinks=layer.sinks,
        )


class VllmTritonSpec(BackendSpec):
    """Declared for tests alone."""

    name = "vllm_triton"
    folder = None
    careful = True
    reads_unwritten_slots = True
    max_offset_bits = 63

    @classmethod
    def unavailable(cls, options):
        return None

    @classmethod
    def unsupported_device(cls, facts, options):
        return None if facts.kind == "cpu" else Refusal("device", facts.kind, "cpu, interpreted")

    @classmethod
    def unsupported(cls, query, options):
        refused = CAPABILITIES.check(query)
        if refused is None and cls.careful:
            refused = next((r for name, r in WRONG.items() if wrong(name, query)), None)
        return refused

    @classmethod
    def layouts(cls, spec, facts, options):
        content = spec.content
        if not isinstance(content, KVHeads) or content.quant is not None or content.head_dim != content.v_dim:
            return ()
        return [LayoutOption(nhd(content), KernelBlocks(multiple_of=16))]

    @classmethod
    def create(cls, device, options):
        return VllmTriton(cls.folder)

    @classmethod
    def proof(cls, options, facts):
        return "interpreter"


def judge(folder):
    """Outcomes of the kit's fast level, and for each combination of `WRONG` whether the kit finds it wrong."""
    VllmTritonSpec.folder = Path(folder)
    results = run(VllmTritonSpec, level="fast", probe_refused=False)
    VllmTritonSpec.careful = False
    facts = {
        "bidirectional window": {"causal": False, "window": 5},
        "bidirectional alibi": {"causal": False, "alibi": True},
        "alibi with sinks": {"alibi": True, "sinks": True},
    }
    seqs = (Seq(19, 1), Seq(16, 1), Seq(17, 5), Seq(0, 18))
    cases = [
        Case(f"X.{name}", "L2", "attend", phase="mixed", seqs=seqs, block_size=16, **changes)
        for name, changes in facts.items()
    ]
    found = run(VllmTritonSpec, cases, probe_refused=False)
    # The declaration lies beside the kernel's adapter here, which loads torch.
    told = [(r.case.id, r.outcome, r.reason) for r in results if r.case.id != "L0.no_torch"]
    return {"kit": told, "wrong": {r.case.id.partition(".")[2]: r.outcome for r in found}}


if __name__ == "__main__":
    print(json.dumps(judge(sys.argv[1])))
