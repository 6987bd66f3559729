"""Writes that lose, move, spill or coarsen tokens."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "padding_to_block_0", "L1", "a token with slot -1 is written to block 0", "step.py",
        "write_rows = (slots >= 0).nonzero().squeeze(1)",
        "slots = slots.clamp(min=0)\nwrite_rows = (slots >= 0).nonzero().squeeze(1)",
        cases=("write.padding", "write.all_padding"),
    ),
    Mutant(
        "padding_only_at_the_end", "L1", "padding is taken to lie behind all other tokens", "step.py",
        "write_slots = slots[write_rows]",
        "write_rows = torch.arange(len(write_rows))\nwrite_slots = slots[write_rows]",
        cases=("write.padding",),
    ),
    Mutant(
        "writes_another_layout", "L1", "writes (token, head, dim) whatever the layout says", "backend.py",
        "view = in_token_order(field, cache[field], metadata.layout)",
        "shape = (metadata.size, layer.query.num_kv_heads, -1)\n"
        "view = cache[field].flatten(1).unflatten(1, shape)",
        cases=("write.layout=1",), reports=("A38",),
    ),
    Mutant(
        "first_token_lost", "L1", "the first token of the step is not written", "backend.py",
        "put(view, metadata.write_slots, metadata.size, stored)",
        "put(view, metadata.write_slots[1:], metadata.size, stored[1:])",
        cases=("write.base",),
    ),
    Mutant(
        "takes_fused_for_contiguous", "L1", "reads its input by shape, not by stride", "backend.py",
        'values = tensors[name][metadata.write_rows]',
        'strides = torch.empty(tensors[name].shape, device="meta").stride()\n'
        "by_shape = tensors[name].as_strided(tensors[name].shape, strides)\n"
        "values = by_shape[metadata.write_rows]",
        cases=("write.fused",),
    ),
    Mutant(
        "no_kernel_for_the_block", "L1", "any block size is declared, and the kernel of most is missing",
        "backend.py",
        'for name in ("k", "v"):',
        "if metadata.size not in (8, 32, 64):\n"
        '    raise RuntimeError(f"no kernel for pages of {metadata.size} tokens")\n'
        'for name in ("k", "v"):',
        cases=("write.block_size",), reports=("A18",),
    ),
    Mutant(
        "slots_taken_for_a_run", "L1", "blocks are taken to follow one another", "store.py",
        "block = slots // size",
        "block = (slots[:1] + torch.arange(len(slots))) // size",
        cases=("write.base",),
    ),
    Mutant(
        "block_size_power_of_two", "L1", "offsets are masked bits: right for powers of two alone", "store.py",
        "offset = slots % size",
        "offset = slots & (size - 1)",
        cases=("write.block_size=3P",), reports=("A17",),
    ),
    Mutant(
        "clears_the_rest_of_the_block", "L1", "a write clears what follows in its last block", "store.py",
        "view_NP[block, offset] = values",
        "for b, o in zip(block[-1:], offset[-1:]):\n"
        "    view_NP[b, o:] = 0\n"
        "view_NP[block, offset] = values",
        cases=("write.base",),
    ),
    Mutant(
        "vectors_of_32", "L1", "copies whole vectors of 32 elements and no rest", "store.py",
        "if layer.query.quant is None:",
        "values = values.clone()\n"
        "values[..., values.shape[-1] // 32 * 32 :] = 0\n"
        "if layer.query.quant is None:",
        cases=("write.head_dim=80",),
    ),
    Mutant(
        "cuts_to_bfloat16", "L1", "conversion to bfloat16 cuts bits where it should round", "store.py",
        "return {name: values.to(stored)}",
        "if stored == torch.bfloat16:\n"
        "    values = (values.float().contiguous().view(torch.int32) & -65536).view(torch.float32)\n"
        "return {name: values.to(stored)}",
        cases=("write.cache_dtype=bfloat16",),
    ),
    Mutant(
        "one_scale_a_token", "L1", "all heads of a token share the scale that each should have", "store.py",
        "scale = wide.abs().amax(-1) / INT8_TOP",
        "scale = (wide.abs().amax((-1, -2), keepdim=True) / INT8_TOP).expand(*wide.shape[:2], 1)[..., 0]",
        cases=("write.cache_dtype=int8_token_head",), reports=("A33",),
    ),
    Mutant(
        "floor_under_the_scale", "L1", "a floor under the scale coarsens small tokens", "store.py",
        "divisor = torch.where(scale == 0, torch.ones_like(scale), scale)",
        "divisor = scale.clamp(min=0.01)",
        cases=("write.cache_dtype=int8_token_head.scale=0.3",),
    ),
    Mutant(
        "truncates_codes", "L1", "int8 codes are cut where they should be rounded", "store.py",
        "codes = (wide / divisor[..., None]).round()",
        "codes = (wide / divisor[..., None]).trunc()",
        cases=("write.cache_dtype=int8_token_head",),
    ),
    Mutant(
        "values_by_the_scale_of_keys", "L1", "values are divided by the scale of keys", "store.py",
        "scaled = wide / constant_scale(layer, name)",
        'scaled = wide / constant_scale(layer, "k")',
        cases=("write.cache_dtype=fp8_e4m3_tensor",), reports=("A32",),
    ),
    Mutant(
        "saturates_too_early", "L1", "fp8 saturates at 240, the top of another e4m3", "store.py",
        "top = torch.finfo(stored).max",
        "top = 240.0",
        cases=("write.cache_dtype=fp8_e4m3_tensor",), reports=("A32",),
    ),
)  # fmt: skip
