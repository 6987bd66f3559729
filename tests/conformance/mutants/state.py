"""Faults of state: right in the first step, for the first layer, on an instance that is warm."""

from .mutant import Mutant

MUTANTS = (
    Mutant(
        "slopes_of_the_first_layer",
        "L2",
        "the ALiBi slopes of the first layer that it saw serve for all",
        "backend.py",
        "parts.append(one_partition(layer.query, facts, call, q_SHQD, k_SKpD, v_SKpV, start_S))",
        "if facts.slopes_H is not None:\n"
        '    kept = self.__dict__.setdefault("kept", {})\n'
        "    facts.slopes_H = kept.setdefault(len(facts.slopes_H), facts.slopes_H)\n"
        "parts.append(one_partition(layer.query, facts, call, q_SHQD, k_SKpD, v_SKpV, start_S))",
        cases=("attend.heads=40x8.alibi", "attend.heads=16x16.alibi"),
        victim="partitioned",
    ),
    Mutant(
        "wrong_from_its_third_step",
        "L3",
        "from the third step on, a step has one call",
        "backend.py",
        "return plan_step(batch, group)",
        'self.steps = self.__dict__.get("steps", 0) + 1\n'
        "step = plan_step(batch, group)\n"
        "step.calls = step.calls[:1] if self.steps > 2 else step.calls\n"
        "return step",
        cases=("walk",),
        victim="partitioned",
    ),
    Mutant(
        "wide_rows_are_remembered",
        "L3",
        "a call is padded like the widest before it, and the rest of its queries are those of before",
        "backend.py",
        'q_SHQD = query["q"][rows].transpose(1, 2).float()',
        'q_SHQD = query["q"][rows].transpose(1, 2).float()\n'
        'kept = self.__dict__.setdefault("kept", {})\n'
        "if kept.get(q_SHQD.shape[:2], q_SHQD).shape[2] > q_SHQD.shape[2]:\n"
        "    q_SHQD = kept[q_SHQD.shape[:2]][:, :, : q_SHQD.shape[2]]\n"
        "kept[q_SHQD.shape[:2]] = q_SHQD",
        cases=("walk",),
        victim="partitioned",
    ),
    Mutant(
        "mask_of_the_kv_group",
        "L3",
        "the mask of the first attention group of a KV group serves for all of them",
        "step.py",
        "mask = group.query.mask",
        'kept = batch.__dict__.setdefault("kept", {})\nmask = kept.setdefault(group.kv_group, group.query.mask)',
        cases=("attend.kin=window", "attend.kin=all"),
    ),
    Mutant(
        "scale_of_the_kv_group",
        "L3",
        "scale and soft-cap of the first attention group of a KV group serve for all of them",
        "step.py",
        "part = batch.groups[group.kv_group]",
        'first = batch.__dict__.setdefault("kept", {}).setdefault(group.kv_group, group.query)\n'
        "group.query.__dict__.update(scale=first.scale, softcap=first.softcap)\n"
        "part = batch.groups[group.kv_group]",
        cases=("attend.kin=scale", "attend.kin=softcap"),
        victim="partitioned",
    ),
    Mutant(
        "decodes_need_a_prefill",
        "L2",
        "a decode is right when the instance has run a prefill before",
        "backend.py",
        "used = call.rows_SQ >= 0",
        "used = call.rows_SQ >= 0\n"
        'self.warm = self.__dict__.get("warm", False) or used.shape[1] > 1\n'
        "used = used & self.warm",
        cases=("attend.base",),
        victim="partitioned",
    ),
    Mutant(
        "one_scale_if_the_first_layer_has_one",
        "L2",
        "where keys and values of the first layer share a scale, those of later layers do",
        "backend.py",
        'found = layer.k_scale if name == "k" else layer.v_scale',
        "if layer.cache_id.layer == 0:\n"
        "    self.same = layer.k_scale.equal(layer.v_scale)\n"
        'found = layer.k_scale if name == "k" or self.same else layer.v_scale',
        cases=("attend.heads=40x8.fp8_e5m2_head", "attend.heads=64x4.fp8_e5m2_head"),
        victim="partitioned",
    ),
    Mutant(
        "writes_with_8_scales",
        "L1",
        "the ninth layer writes with the scale of the first",
        "backend.py",
        "scaled = x_TKD.float() / self.scale(layer, name)",
        'kept = self.__dict__.setdefault("scales", {})\n'
        "kept[layer.cache_id.layer, name] = self.scale(layer, name)\n"
        "scaled = x_TKD.float() / kept[layer.cache_id.layer % 8, name]",
        cases=("write.cache_dtype=fp8_e4m3_tensor.layers=12",),
        victim="partitioned",
    ),
    Mutant(
        "reads_with_8_scales",
        "L3",
        "the ninth layer reads with the scale of the first",
        "backend.py",
        "return wide if layer.query.quant is None else wide * self.scale(layer, name)",
        "if layer.query.quant is None:\n"
        "    return wide\n"
        'kept = self.__dict__.setdefault("read", {})\n'
        "kept[layer.cache_id.layer, name] = self.scale(layer, name)\n"
        "return wide * kept[layer.cache_id.layer % 8, name]",
        cases=("attend.layers=12.fp8_e4m3_tensor",),
        victim="partitioned",
    ),
    Mutant(
        "partition_of_the_first_layer",
        "L2",
        "what the first layer found in the first of several partitions serves for the layers after it",
        "backend.py",
        "found_SHQV, found_SHQ = reduce(facts, parts)",
        'kept = call.__dict__.setdefault("kept", parts[0])\n'
        "parts = parts if len(parts) == 1 else [kept, *parts[1:]]\n"
        "found_SHQV, found_SHQ = reduce(facts, parts)",
        cases=("attend.context=256.layers=2", "attend.context=512.layers=2"),
        victim="partitioned",
    ),
)
