"""Writes down what vLLM tells its attention backend: layers, groups, and the metadata of each step.

Used by `generate.py` for a job with `record`; `tests/data/vllm_steps.json` was made so.
"""

from __future__ import annotations

import inspect
from dataclasses import fields


class Recorder:
    """Looks over the shoulder of our adapter while one engine runs; `written` is plain JSON."""

    def __init__(self):
        from kvcore_vllm.builder import StepBuilder
        from kvcore_vllm.layer import KvcoreLayer

        self.layers, self.groups, self.steps = [], [], []
        self.undo = [
            (c, n, vars(c)[n])
            for c, n in ((KvcoreLayer, "__init__"), (StepBuilder, "__init__"), (StepBuilder, "build"))
        ]
        (_, _, layer), (_, _, bind), (_, _, build) = self.undo
        builders = []

        def record_layer(impl, *arguments, **more):
            given = inspect.signature(layer).bind(impl, *arguments, **more).arguments
            self.layers.append({n: plain(v) for n, v in given.items() if n != "self"})
            layer(impl, *arguments, **more)

        def record_group(builder, spec, names, config, device):
            builders.append(builder)
            told = {f.name: plain(getattr(spec, f.name)) for f in fields(spec)}
            self.groups.append(
                {"spec": type(spec).__name__, "fields": told, "bytes": spec.page_size_bytes, "layers": list(names)}
            )
            self.limits = (config.scheduler_config.max_num_seqs, config.scheduler_config.max_num_batched_tokens)
            bind(builder, spec, names, config, device)

        def record_step(builder, common_prefix_len, common_attn_metadata, fast_build=False):
            m, group = common_attn_metadata, builders.index(builder)
            columns = -(-int(m.seq_lens.max()) // builder.kv_cache_spec.block_size)
            tokens = int(m.query_start_loc_cpu[-1])
            self.steps.append(
                {
                    "group": group,
                    "query_start_loc": m.query_start_loc.tolist(),
                    "seq_lens": m.seq_lens.tolist(),
                    "block_table": m.block_table_tensor[:, :columns].tolist(),
                    "slot_mapping": m.slot_mapping[:tokens].tolist(),
                    "dtypes": {
                        "query_start_loc": dtype(m.query_start_loc),
                        "seq_lens": dtype(m.seq_lens),
                        "block_table": dtype(m.block_table_tensor),
                        "slot_mapping": dtype(m.slot_mapping),
                    },
                    "causal": m.causal,
                }
            )
            return build(builder, common_prefix_len, common_attn_metadata, fast_build)

        KvcoreLayer.__init__, StepBuilder.__init__, StepBuilder.build = record_layer, record_group, record_step

    def written(self, llm):
        """What was seen, and how the blocks of each layer lie."""
        for owner, name, original in self.undo:
            setattr(owner, name, original)
        context = llm.llm_engine.vllm_config.compilation_config.static_forward_context
        served = {n: m.kv_cache for n, m in context.items() if hasattr(m, "impl")}
        named = [
            {"name": n, "arguments": a, "blocks": {"shape": list(c.shape), "stride": list(c.stride())}}
            for (n, c), a in zip(served.items(), self.layers, strict=True)
        ]
        return {"limits": self.limits, "layers": named, "groups": self.groups, "steps": self.steps}


def dtype(tensor):
    return str(tensor.dtype).removeprefix("torch.")


def plain(value):
    """As JSON; a tensor only by its being there."""
    if value is None or isinstance(value, bool | int | float | str):
        return value.value if hasattr(value, "value") else value
    return (
        [plain(x) for x in value]
        if isinstance(value, list)
        else type(value).__name__
        if hasattr(value, "shape")
        else str(value)
    )
