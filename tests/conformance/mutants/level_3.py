"""Answers that hold only in a tidy memory, one step, one layer, one group."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "values_outside_the_window", "L3", "values that no query sees are multiplied by 0: 0 * NaN",
        "step.py",
        "wanted = seen_tn.any(0)",
        "wanted = torch.ones_like(key_n, dtype=torch.bool)",
        cases=("attend.poison=nan.window", "attend.poison=inf.window"), reports=("A25", "A21"),
    ),
    Mutant(
        "reads_past_the_length", "L3", "the whole last block is read, past the end of the sequence",
        "step.py",
        "held = int(part.kv_lens_host[s])",
        "held = -(-int(part.kv_lens_host[s]) // size) * size",
        cases=("attend.poison=inf.bidirectional", "attend.poison=nan.bidirectional"), reports=("A20", "A21"),
    ),
    Mutant(
        "last_partial_block_dropped", "L3", "keys in the last block count only when it is full", "step.py",
        "key_n = key_n[wanted]",
        "wanted = wanted & (key_n // size * size + size <= length)\nkey_n = key_n[wanted]",
        cases=("attend.last_block",),
    ),
    Mutant(
        "table_taken_for_sorted", "L3", "block ids are taken to rise along the sequence", "step.py",
        "table = torch.from_numpy(part.block_table_host[s].astype(np.int64)).to(device)",
        "table = torch.from_numpy(np.sort(part.block_table_host[s][: part.counts_host[s]]).astype(np.int64))",
        cases=("placement.permuted",),
    ),
    Mutant(
        "table_of_the_first_group", "L3", "every KV group reads and writes by the table of group 0",
        "step.py",
        "part = batch.groups[group.kv_group]",
        "part = batch.groups[0]",
        cases=("attend.two_groups=window.slots",), reports=("A20",),
    ),
    Mutant(
        "metadata_of_the_step_before", "L3", "buffers at the same address are taken for the same step",
        "backend.py",
        "return plan_step(batch, group, self.device)",
        "buffer = batch.groups[group.kv_group].slot_mapping_T\n"
        'plans = self.__dict__.setdefault("plans", {})\n'
        "return plans.setdefault(buffer.data_ptr(), (buffer, plan_step(batch, group, self.device)))[1]",
        cases=("steps.two_steps",),
    ),
    Mutant(
        "views_of_the_first_layer", "L3", "the views of a group's first layer serve for all its layers",
        "backend.py",
        "view = in_token_order(name, cache[name], metadata.layout)",
        'views = metadata.__dict__.setdefault("views", {})\n'
        "view = in_token_order(name, views.setdefault(name, cache[name]), metadata.layout)",
        cases=("attend.layers=3",),
    ),
    Mutant(
        "block_stride_from_the_page", "L3", "a block stride is taken to be the bytes of a page", "store.py",
        "return view.permute(0, *order)",
        "page = layout.kernel_page_bytes // view.element_size()\n"
        "return view.as_strided(view.shape, (page, *view.stride()[1:])).permute(0, *order)",
        cases=("attend.two_groups=float16.packed", "attend.layers=3.packed"), reports=("A33",),
    ),
    Mutant(
        "offsets_of_31_bits", "L3", "offsets are computed in int32 though 63 bits are declared", "store.py",
        "from_block = slots // size",
        "stride = view_NP.stride(0)\n"
        "from_block = (slots // size * stride).to(torch.int32).to(torch.int64) // stride",
        cases=("offsets",), reports=("A35",),
    ),
    Mutant(
        "rows_without_keys", "L3", "a padded row is left as it was", "softmax.py",
        "zeros = q_tHD.new_zeros((*q_tHD.shape[:2], facts.head_dim_v))",
        "zeros = q_tHD.new_full((*q_tHD.shape[:2], facts.head_dim_v), torch.nan)",
        cases=("padded",),
    ),
)  # fmt: skip
