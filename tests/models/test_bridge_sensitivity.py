"""The parity tests can fail: attention, its window, its chunk and its sinks move the logits."""

from dataclasses import replace

import pytest
import torch
from models.dense_context import DenseContext
from models.test_bridge_parity import flat_step, load, tokens
from models.tiny import DEFAULT_RUN, tiny_model

from kvcore.attention.query import Mask
from kvcore.errors import UnsupportedModelError
from kvcore.models.bridge_tuning import PositionTuning
from kvcore.spec.cache_spec import CacheId

MOVED = 1e-2


def logits(model, queries, **options):
    ids = tokens(70, 1)
    return flat_step(model, DenseContext(queries, **options), [(0, ids, 0)])[0]


@pytest.fixture
def model(request, tmp_path_factory):
    return load(tiny_model(request.param, tmp_path_factory.getbasetemp()))


@pytest.mark.parametrize("model", DEFAULT_RUN, indirect=True)
def test_every_declared_fact_moves_the_logits(model):
    plain = logits(model, model.queries)
    assert (plain - logits(model, model.queries, zero=True)).abs().max() > MOVED
    wider = {c: replace(q, mask=Mask()) for c, q in model.queries.items()}
    if wider != model.queries:
        assert (plain - logits(model, wider)).abs().max() > MOVED
    for fact, other in (("sinks", False), ("softcap", None), ("scale", 1.0)):
        edited = {c: replace(q, **{fact: other}) for c, q in model.queries.items()}
        if edited != model.queries:
            assert (plain - logits(model, edited)).abs().max() > MOVED, fact


@pytest.mark.parametrize("model", ["llama4"], indirect=True)
def test_llama4_tuning_follows_each_tokens_own_position(model):
    assert set(model.tuning) == {CacheId(3)}
    plain = logits(model, model.queries)
    model.tuning.clear()
    assert (plain - logits(model, model.queries)).abs().max() > MOVED


def test_tuning_formula():
    scaled = PositionTuning(4.0, 0.1).scale(torch.ones(3, 1, 1), torch.tensor([0, 3, 11]))
    want = torch.tensor([1.0, 1 + 0.1 * 0.6931472, 1 + 0.1 * 1.3862944])  # log1p of 0, 1 and 3
    assert torch.allclose(scaled.flatten(), want)


@pytest.mark.parametrize("model", ["gpt_oss"], indirect=True)
def test_sinks_are_found_on_the_module(model):
    for cache_id in model.queries:
        module = model.module.model.layers[cache_id.layer].self_attn
        assert torch.equal(model.attention_tensors(cache_id)["sinks"], module.sinks)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_layers_without_sinks_have_no_tensors(model):
    assert model.attention_tensors(CacheId(0)) == {}


@pytest.mark.parametrize(
    ("name", "facts", "field"),
    [
        ("llama", {"scale": 0.5}, "scaling"),
        ("llama", {"sinks": True}, "sinks"),
        ("llama", {"num_kv_heads": 4}, "num_kv_heads"),
        ("llama", {"mask": Mask(causal=False)}, "is_causal"),
        ("mistral_window", {"mask": Mask(window=15)}, "sliding_window"),
        ("mistral_window", {"mask": Mask()}, "sliding_window"),
        ("gemma2", {"softcap": None}, "softcap"),
        ("gpt_oss", {"sinks": False}, "sinks"),
    ],
)
def test_a_module_that_disagrees_with_the_facts_is_an_error(name, facts, field, tmp_path_factory):
    model = load(tiny_model(name, tmp_path_factory.getbasetemp()))
    model.queries = {c: replace(q, **facts) for c, q in model.queries.items()}
    with pytest.raises(UnsupportedModelError) as raised:
        model.check_reached()
    assert raised.value.field == field


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_caches_that_are_never_reached_are_an_error(model):
    model.queries[CacheId(2)] = model.queries[CacheId(0)]
    with pytest.raises(UnsupportedModelError, match="once a layer") as raised:
        model.check_reached()
    assert "L2" in str(raised.value.got)


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_layer_without_a_cache_is_an_error(model):
    del model.queries[CacheId(1)]
    with pytest.raises(UnsupportedModelError, match="no cache"):
        model.check_reached()


@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_only_the_wanted_rows_come_back(model):
    ids = tokens(9, 3)
    every = flat_step(model, DenseContext(model.queries), [(0, ids, 0)])[0]
    for rows in ([8], [2, 5], []):
        wanted = torch.tensor(rows, dtype=torch.int64)
        context = DenseContext(model.queries).step([(0, 9)])
        some = model.forward(ids, torch.arange(9), wanted, context)
        assert some.dtype == torch.float32
        assert some.shape == (len(rows), 256)
        assert torch.allclose(some, every[wanted], atol=1e-5)
