"""`PagedCache`: the middle of an engine, without our engine; every answer beside dense attention in float64."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, MistralConfig

from kvcore.cache import PagedCache
from kvcore.errors import CapacityError, ConfigError, IntegrityError, SpecError

GEOMETRY = {
    "model_type": "mistral",
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "sliding_window": None,
    "torch_dtype": "float32",
}
ENGINE = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "max_model_len": 256}


def make(model=GEOMETRY, **more):
    return PagedCache.for_model(model, **{"backend": "torch", "engine": ENGINE, "cache": {"num_blocks": 40}} | more)


def tensors(tokens, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tokens, heads, 16, generator=generator) for heads in (4, 2, 2)]


def dense(query_THD, key_SKD, value_SKD, window=None):
    """The last T of S tokens attend to all before them (and within the window), in float64."""
    q, k, v = query_THD.double(), key_SKD.double(), value_SKD.double()
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], dim=1) for t in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) * q.shape[-1] ** -0.5
    rows = torch.arange(len(k))[len(k) - len(q) :, None]
    columns = torch.arange(len(k))[None]
    seen = (columns <= rows) & (columns > rows - (window or len(k) + 1))
    return torch.einsum("hts,shd->thd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


def test_blocks_that_the_caller_keeps():
    cache = make()
    q, k, v = tensors(39)
    cache.enter(7)
    cache.assign(7, 0, [5, 3, 9])
    for start, stop in ((0, 20), (20, 38), (38, 39)):
        batch = cache.begin([7], [stop - start])
        assert cache.positions_T[: batch.num_tokens].tolist() == list(range(start, stop))
        for layer in (0, 1):
            cache.write(layer, k[start:stop], v[start:stop])
            out = cache.attend(layer, q[start:stop])
            torch.testing.assert_close(out.double(), dense(q[start:stop], k[:stop], v[:stop]), atol=1e-5, rtol=1e-5)
    assert (cache.num_tokens(7), cache.blocks(7), cache.rows) == (39, [[5, 3, 9]], [7])


def test_blocks_of_the_manager_with_a_shared_prefix_and_a_fork():
    cache = make()
    manager, prompt = cache.make_manager(), list(range(1, 40))
    q, k, v = tensors(40)
    first = manager.begin(prompt)
    step = manager.begin_step()
    assert step.try_add(first, len(prompt)) == 0
    allocated = manager.allocate(step)
    cache.begin_allocated(allocated)
    cache.write(0, k[:39], v[:39])
    manager.commit(allocated.step)
    manager.retire(allocated.step)
    second = manager.begin([*prompt, 50])
    hit = manager.lookup(second)
    assert hit == 32
    step = manager.begin_step()
    assert step.try_add(second, 40 - hit) == 0
    cache.begin_allocated(manager.allocate(step))
    cache.write(0, k[hit:], v[hit:])
    torch.testing.assert_close(cache.attend(0, q[hit:]).double(), dense(q[hit:], k, v), atol=1e-5, rtol=1e-5)
    assert cache.blocks(second)[0][:2] == cache.blocks(first)[0][:2]
    manager.check_integrity()


def test_the_arena_lies_in_memory_of_the_caller():
    memory = torch.full((300_001,), 0x55, dtype=torch.uint8)[1:]
    cache = make(cache={}, memory=memory)
    start, end = memory.data_ptr(), memory.data_ptr() + memory.numel()
    for fields in cache.memory.views.values():
        for tensor in fields.values():
            assert start <= tensor.data_ptr() < end
    assert cache.config.total_bytes <= memory.numel()
    q, k, v = tensors(20)
    cache.enter(0)
    cache.assign(0, 0, [1, 2])
    cache.begin([0], [20])
    before = memory.clone()
    cache.write(1, k, v)
    assert (memory != before).any()
    torch.testing.assert_close(cache.attend(1, q).double(), dense(q, k, v), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("memory", "words"),
    [
        (torch.zeros(1000, dtype=torch.int8), "too small"),
        (torch.zeros(2, 600_000, dtype=torch.int8).T, "one run of bytes"),
    ],
)
def test_memory_that_cannot_serve_is_refused(memory, words):
    with pytest.raises((ConfigError, CapacityError), match=words):
        make(cache={}, memory=memory)
    with pytest.raises(ConfigError, match="tells the size"):
        make(memory=memory)


def test_a_module_brings_its_dtype_its_sinks_and_its_windows():
    common = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 16}
    config = GptOssConfig(
        **common,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=24,
        max_position_embeddings=256,
        layer_types=["sliding_attention", "full_attention"],
        rope_scaling=None,
    )
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    cache = make(module)
    assert [layer.layer.sinks.shape for layer in cache.attention.layers.values()] == [(4,), (4,)]
    assert {g.spec.kind for g in cache.config.kv_cache_groups} == {"window", "full"}
    with pytest.raises(SpecError, match="sinks"):
        make(config.to_dict())


def test_a_window_drops_blocks_at_the_front():
    config = MistralConfig(**{n: v for n, v in GEOMETRY.items() if n not in ("model_type", "torch_dtype")})
    config.sliding_window = 20
    cache = make(config.to_dict(), dtype="float32")
    q, k, v = tensors(60)
    cache.enter(0)
    cache.assign(0, 0, [1, 2, 3])
    cache.begin([0], [48])
    cache.write(0, k[:48], v[:48])
    cache.assign(0, 0, [4], drop_front=1)
    cache.begin([0], [12])
    cache.write(0, k[48:], v[48:])
    out = cache.attend(0, q[48:]).double()
    torch.testing.assert_close(out, dense(q[48:], k, v, window=20), atol=1e-5, rtol=1e-5)
    assert cache.blocks(0) == [[2, 3, 4]]


def test_misuse_is_refused_by_name():
    cache = make()
    q, k, v = tensors(4)
    with pytest.raises(IntegrityError, match="outside a step"):
        cache.write(0, k, v)
    with pytest.raises(IntegrityError, match="not entered"):
        cache.begin([0], [4])
    cache.enter(0)
    with pytest.raises(IntegrityError, match="lacks blocks"):
        cache.begin([0], [4])
    cache.assign(0, 0, [1])
    with pytest.raises(IntegrityError, match="no block 400"):
        cache.assign(0, 0, [400])
    cache.begin([0], [4])
    with pytest.raises(IntegrityError, match="no attention is bound"):
        cache.attend(2, q)
    with pytest.raises(IntegrityError, match="not entered"):
        cache.begin([-1], [4])
    for row in (1, 2, 3):
        cache.enter(row)
    with pytest.raises(IntegrityError, match="more requests than rows"):
        cache.enter(4)
    cache.leave(1)
    cache.leave(1)
    cache.enter(4)
    assert cache.rows == [0, 2, 3, 4]
    with pytest.raises(ConfigError, match="does not say"):
        make(torch.nn.Linear(2, 2))


def test_naming_it_loads_no_torch():
    code = "import sys, kvcore, kvcore.cache; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
