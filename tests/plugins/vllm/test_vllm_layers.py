"""Layers of every kind that the adapter hands to a backend, over the stand-in of vLLM: one step, then another."""

import pytest
import torch
from plugins.vllm.slots import dense

H, K, D, P = 4, 2, 32, 16
LAYER = {"num_heads": H, "head_size": D, "scale": D**-0.5, "num_kv_heads": K}
# Two sequences: a prefill of 20 and one of 3 tokens; then a decode of the second before a longer piece of the first.
STEPS = (
    {"query_start_loc": [0, 20, 23], "seq_lens": [20, 3], "block_table": [[4, 2], [1, 0]]},
    {"query_start_loc": [0, 1, 6], "seq_lens": [4, 25], "block_table": [[1, 0], [4, 2]]},
)
KINDS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window": {"sliding_window": 7},
    "soft-cap": {"logits_soft_cap": 2.0},
    "alibi": {"alibi_slopes": [0.5, 0.25, 0.125, 0.0625]},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8_e5m2": {"kv_cache_dtype": "fp8_e5m2"},
    "values of another size": {"head_size_v": 16},
}
CODES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


class Group:
    """Layers of one vLLM group over one memory of six blocks each, full of what must not matter."""

    def __init__(self, bridge, layers):
        self.bridge, self.config = bridge, bridge.vllm.Config()
        for name, given in layers.items():
            self.config.add(name, bridge.layer.KvcoreLayer, **LAYER | given)
        self.modules = self.config.compilation_config.static_forward_context
        stored = layers[next(iter(layers))].get("kv_cache_dtype")
        dtype = torch.uint8 if stored in CODES else torch.float32
        dim_v = next(iter(self.modules.values())).head_size_v
        for module in self.modules.values():
            module._k_scale, module._v_scale = torch.tensor(0.5), torch.tensor(0.25)
        spec = bridge.vllm.FullAttentionSpec(P, K, D, dtype, dim_v)
        self.builder = bridge.builder.StepBuilder(spec, list(layers), self.config, torch.device("cpu"))
        self.memory = torch.full((6, spec.page_size_bytes), 255, dtype=torch.uint8)

    def step(self, told):
        """What the layers are told."""
        starts, lengths = told["query_start_loc"], told["seq_lens"]
        slots = []
        for s, length in enumerate(lengths):
            new = starts[s + 1] - starts[s]
            slots += [told["block_table"][s][j // P] * P + j % P for j in range(length - new, length)]
        metadata = self.bridge.vllm.CommonAttentionMetadata(
            query_start_loc=torch.tensor(starts, dtype=torch.int32),
            query_start_loc_cpu=torch.tensor(starts, dtype=torch.int32),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table_tensor=torch.tensor(told["block_table"], dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
        )
        return self.builder.build(0, metadata), slots

    def attend(self, name, step, q, k, v):
        out = torch.full((len(q), H, self.modules[name].head_size_v), float("nan"))
        return self.modules[name].impl.forward(self.modules[name], q, k, v, self.memory, step, out)


def stored(tensor, scale, given):
    """A value as it comes back from the cache."""
    codes = CODES.get(given.get("kv_cache_dtype"))
    return tensor.double() if codes is None else (tensor / scale).to(codes).double() * scale


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_is_dense_attention_over_slots(bridge, kind):
    given = KINDS[kind]
    group, slots = Group(bridge, {"model.layers.0.attn": given}), {}
    dim_v = given.get("head_size_v", D)
    torch.manual_seed(0)
    for told in STEPS:
        tokens = told["query_start_loc"][-1]
        q, k, v = torch.randn(tokens, H, D), torch.randn(tokens, K, D), torch.randn(tokens, K, dim_v)
        step, written = group.step(told)
        out = group.attend("model.layers.0.attn", step, q, k, v)
        kept = zip(stored(k, 0.5, given), stored(v, 0.25, given), strict=True)
        slots.update(zip(written, kept, strict=True))
        want = dense(q.double(), told, slots, LAYER | given, P)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)


def test_a_layer_that_shares_a_cache_reads_and_never_writes(bridge):
    shared = {"kv_sharing_target_layer_name": "model.layers.0.attn", "sliding_window": 5}
    group = Group(bridge, {"model.layers.0.attn": {}, "model.layers.1.attn": shared})
    step, slots = group.step(STEPS[0])
    torch.manual_seed(0)
    q, k, v = torch.randn(23, H, D), torch.randn(23, K, D), torch.randn(23, K, D)
    group.attend("model.layers.0.attn", step, q, k, v)
    before = group.memory.clone()
    kept = dict(zip(slots, zip(k.double(), v.double(), strict=True), strict=True))
    for keys in (None, torch.randn_like(k)):
        out = group.attend("model.layers.1.attn", step, q, keys, keys)
        want = dense(q.double(), STEPS[0], kept, LAYER | shared, P)
        torch.testing.assert_close(out.double(), want, atol=1e-5, rtol=1e-5)
    assert torch.equal(group.memory, before)


def test_rows_beyond_the_step_are_left_alone(bridge):
    """vLLM pads a step's tensors."""
    group = Group(bridge, {"model.layers.0.attn": {}})
    step, _ = group.step(STEPS[0])
    q, k, v = torch.randn(30, H, D), torch.randn(30, K, D), torch.randn(30, K, D)
    out = group.attend("model.layers.0.attn", step, q, k, v)
    assert not out[:23].isnan().any()
    assert out[23:].isnan().all()
