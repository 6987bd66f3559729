"""Wrong answers."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "window_off_by_one", "L2", "the window holds one key too many", "step.py",
        "seen_tn = seen_tn & (j > i - mask.window)",
        "seen_tn = seen_tn & (j >= i - mask.window)",
        cases=("attend.window=P+1",),
    ),
    Mutant(
        "window_ahead_off_by_one", "L2", "a bidirectional window reaches one key too far ahead", "step.py",
        "seen_tn = seen_tn & (j < i + mask.window)",
        "seen_tn = seen_tn & (j <= i + mask.window)",
        cases=("attend.mask=bidirectional+window",),
    ),
    Mutant(
        "chunk_taken_for_window", "L2", "a chunk is treated as a window of its size", "step.py",
        "seen_tn = seen_tn & (j // mask.chunk == i // mask.chunk)",
        "seen_tn = seen_tn & (i - j < mask.chunk)",
        cases=("attend.chunk",),
    ),
    Mutant(
        "bidirectional_taken_for_causal", "L2", "bidirectional is accepted and ignored", "step.py",
        "if mask.causal:",
        "if mask:",
        cases=("attend.mask=bidirectional",), reports=("A26",),
    ),
    Mutant(
        "top_left_queries", "L2", "queries are the first ones of their sequence, not the last", "step.py",
        "query_t = torch.arange(length - (stop - start), length, device=device)",
        "query_t = torch.arange(0, stop - start, device=device)",
        cases=("attend.base",),
    ),
    Mutant(
        "live_tail_from_0", "L2", "the first column of the table is taken for the start of the sequence",
        "step.py",
        "origin = int(part.first_block_host[s]) * size",
        "origin = 0",
        cases=("attend.window=P.tail", "attend.window=P+1.tail"),
    ),
    Mutant(
        "prefill_sees_only_itself", "L2", "a step of several tokens does not see the cached prefix",
        "step.py",
        "key_n = torch.arange(origin, origin + held, device=device)",
        "first = origin if stop - start == 1 else max(origin, length - (stop - start))\n"
        "key_n = torch.arange(first, origin + held, device=device)",
        cases=("attend.base.prefix_hit", "attend.base.chunked"),
    ),
    Mutant(
        "first_block_size_for_all", "L2", "the block size of the first step it saw serves for all", "step.py",
        "size = part.kernel_block_size",
        'size = plan_step.__dict__.setdefault("size", part.kernel_block_size)',
        cases=("attend.base", "attend.block_size"), reports=("A20",),
    ),
    Mutant(
        "kernel_taken_for_manager_blocks", "L2", "ids of kernel blocks are read as ids of manager blocks",
        "step.py",
        "block_n = table[(key_n - origin) // size]",
        "import math\n"
        "size = size * max(1, math.gcd(*part.counts_host.tolist()))\n"
        "block_n = table[(key_n - origin) // size]",
        cases=("attend.kernel_ratio=2",), reports=("A20",),
    ),
    Mutant(
        "scale_ignored", "L2", "the layer's softmax scale is accepted and ignored", "softmax.py",
        "scaled_tHD = q_tHD * facts.softmax_scale",
        "scaled_tHD = q_tHD * facts.head_dim**-0.5",
        cases=("attend.scale",), reports=("A26",),
    ),
    Mutant(
        "heads_interleaved", "L2", "query heads take KV heads in turn, not in groups", "softmax.py",
        "kv_head_H = torch.arange(facts.num_heads, device=q_tHD.device) // facts.group_size",
        "kv_head_H = torch.arange(facts.num_heads, device=q_tHD.device) % facts.num_kv_heads",
        cases=("attend.gqa",),
    ),
    Mutant(
        "value_heads_reversed", "L2", "values are read from the KV heads in reverse", "softmax.py",
        "values_nHV = values_nKV[:, kv_head_H]",
        "values_nHV = values_nKV[:, kv_head_H.flip(0)]",
        cases=("attend.gqa",),
    ),
    Mutant(
        "softcap_dropped", "L2", "the soft-cap is accepted and ignored", "softmax.py",
        "if facts.softcap is not None:",
        "if facts.softcap is None and facts.softcap:",
        cases=("attend.softcap",), reports=("A26", "A30"),
    ),
    Mutant(
        "softcap_raises", "L2", "the soft-cap is accepted, and fails when it is used", "softmax.py",
        "scores_Htn = facts.softcap * torch.tanh(scores_Htn / facts.softcap)",
        'raise NotImplementedError("soft-cap")',
        cases=("attend.softcap",), reports=("A30",),
    ),
    Mutant(
        "alibi_without_a_decode_kernel", "L2", "ALiBi is accepted, and the kernel of decodes lacks it",
        "softmax.py",
        "if layer.alibi_slopes is not None:",
        "if layer.alibi_slopes is not None and len(step.query_t) == 1:\n"
        '    raise RuntimeError("this version takes no slopes")\n'
        "if layer.alibi_slopes is not None:",
        cases=("attend.alibi",), reports=("A29",),
    ),
    Mutant(
        "alibi_sign", "L2", "slopes reward distance", "softmax.py",
        "bias_Htn = layer.alibi_slopes[:, None, None] * distance_tn",
        "bias_Htn = layer.alibi_slopes[:, None, None] * -distance_tn",
        cases=("attend.alibi",),
    ),
    Mutant(
        "alibi_ahead", "L2", "keys ahead of the query are rewarded: the distance has a sign", "softmax.py",
        "distance_tn = (step.query_t[:, None] - step.key_n[None, :]).abs()",
        "distance_tn = step.query_t[:, None] - step.key_n[None, :]",
        cases=("attend.mask=bidirectional+alibi",),
    ),
    Mutant(
        "bias_is_capped_too", "L2", "the soft-cap bends the ALiBi bias as well", "softmax.py",
        "scores_Htn = scores_Htn - bias_Htn",
        "if facts.softcap is not None:\n"
        "    bias_Htn = facts.softcap * torch.tanh(bias_Htn / facts.softcap)\n"
        "scores_Htn = scores_Htn - bias_Htn",
        cases=("attend.softcap+alibi",),
    ),
    Mutant(
        "sinks_ignored", "L2", "sinks are accepted and ignored", "softmax.py",
        "total_Ht1 = total_Ht1 + torch.exp(sinks_H11 - peak_Ht1)",
        "total_Ht1 = total_Ht1 + 0",
        cases=("attend.sinks",), reports=("A26",),
    ),
    Mutant(
        "sinks_by_kv_head", "L2", "the sink of a KV head's first query head serves for all of its group",
        "softmax.py",
        "sinks_H11 = layer.sinks[:, None, None].to(scores_Htn.dtype)",
        "firsts_H = kv_head_H * facts.group_size\n"
        "sinks_H11 = layer.sinks[firsts_H, None, None].to(scores_Htn.dtype)",
        cases=("attend.sinks",), reports=("A27",),
    ),
    Mutant(
        "float64_in_float32", "L2", "float64 is declared and computed in float32", "backend.py",
        'wide = torch.float64 if torch.float64 in (q_tHD.dtype, cache["k"].dtype) else torch.float32',
        "wide = torch.float32",
        cases=("attend.dtype=float64",), reports=("A27",),
    ),
    Mutant(
        "queries_quantized_too", "L2", "an fp8 cache makes it round the queries to fp8 as well", "backend.py",
        'q_tHD = query["q"][step.rows]',
        'q_tHD = query["q"][step.rows]\n'
        'if layer.query.cache_dtype == "fp8_e4m3":\n'
        "    q_tHD = q_tHD.to(torch.float8_e4m3fn).to(q_tHD.dtype)",
        cases=("attend.cache_dtype=fp8_e4m3_tensor",), reports=("A32",),
    ),
    Mutant(
        "scale_defaults_to_1", "L2", "the scale of a tensor is taken for 1 when it is read", "store.py",
        "numbers = numbers * constant_scale(layer, name)",
        "numbers = numbers * 1.0",
        cases=("attend.cache_dtype=fp8_e4m3_tensor",), reports=("A32",),
    ),
    Mutant(
        "scale_view_by_shape", "L2", "the strides of the scale fields are worked out from their shape",
        "backend.py",
        'scales = in_token_order(f"{name}_scale", cache[f"{name}_scale"], metadata.layout)',
        'field = cache[f"{name}_scale"]\n'
        'by_shape = torch.empty(field.shape, device="meta").stride()\n'
        'scales = in_token_order(f"{name}_scale", field.as_strided(field.shape, by_shape), metadata.layout)',
        cases=("attend.cache_dtype=int8_token_head",), reports=("A33",),
    ),
    Mutant(
        "small_blocks_do_not_compile", "L2", "any block size is declared, and small ones do not compile",
        "backend.py",
        "for step in metadata.sequences:",
        "if metadata.size < 8:\n"
        '    raise RuntimeError(f"tile of {metadata.size} is not a power of two of at least 8")\n'
        "for step in metadata.sequences:",
        cases=("attend.block_size=1", "attend.block_size=4"), reports=("A17",),
    ),
    Mutant(
        "no_kernel_at_544", "L2", "any block size is declared, and the kernel for 544 tokens is missing",
        "backend.py",
        'values_nKV = self.read(layer, "v", cache, metadata, step, wide)',
        "if metadata.size == 544:\n"
        '    raise RuntimeError(f"no kernel for pages of {metadata.size} tokens")\n'
        'values_nKV = self.read(layer, "v", cache, metadata, step, wide)',
        cases=("attend.kernel_block",), reports=("A18",),
    ),
    Mutant(
        "needs_the_fresh_keys", "L2", "a layer that shares a cache has no fresh keys, and it wants them",
        "backend.py",
        'keys_nKD = self.read(layer, "k", cache, metadata, step, wide)',
        'keys_nKD = self.read(layer, "k", cache, metadata, step, wide).to(fresh["k"].device)',
        cases=("attend.shared",),
    ),
)  # fmt: skip
