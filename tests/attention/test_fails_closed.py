"""What a layer's facts promise is there, and a declaration says only words that a query can say."""

from __future__ import annotations

import pytest
import torch

from kvcore.backend import (
    AttentionLayer,
    AttentionQuery,
    CacheId,
    Capabilities,
    ConfigError,
    Feature,
    KVCoreError,
    Mask,
    Refusal,
)

HEADS, KV_HEADS = 4, 2
OWN = {"alibi_slopes": (HEADS,), "sinks": (HEADS,)}
FACTS = {
    "alibi": ({"alibi": True}, {"alibi_slopes": (HEADS,)}),
    "sinks": ({"sinks": True}, {"sinks": (HEADS,)}),
    "tensor": ({"quant": "tensor", "cache_dtype": "int8"}, {"k_scale": (), "v_scale": ()}),
    "head": ({"quant": "head", "cache_dtype": "int8"}, {"k_scale": (KV_HEADS,), "v_scale": (KV_HEADS,)}),
}


def query(**facts: object) -> AttentionQuery:
    return AttentionQuery(
        **{
            "content": "kv",
            "dtype": "float32",
            "cache_dtype": "float32",
            "num_heads": HEADS,
            "num_kv_heads": KV_HEADS,
            "head_dim": 8,
            "head_dim_v": 8,
        }
        | facts
    )


def made(shapes: dict[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    return {name: torch.ones(shape) for name, shape in shapes.items()}


@pytest.mark.parametrize("fact", FACTS)
def test_a_layer_has_what_its_facts_say_and_nothing_else(fact: str) -> None:
    facts, shapes = FACTS[fact]
    AttentionLayer(CacheId(0), query(**facts), **made(shapes))
    for name, shape in shapes.items():
        wrong = {
            "missing": {n: t for n, t in made(shapes).items() if n != name},
            "another shape": made(shapes | {name: (*shape, 3)}),
            "another dtype": made(shapes) | {name: torch.ones(shape, dtype=torch.float16)},
        }
        for what, tensors in wrong.items():
            with pytest.raises(KVCoreError) as caught:
                AttentionLayer(CacheId(0), query(**facts), **tensors)
            assert caught.value.field == name, what
        with pytest.raises(KVCoreError) as caught:
            AttentionLayer(CacheId(0), query(), **made({name: shape}))
        assert caught.value.field == name


def test_scales_of_token_and_head_lie_in_the_page() -> None:
    facts = {"quant": "token_head", "cache_dtype": "int8"}
    AttentionLayer(CacheId(0), query(**facts))
    with pytest.raises(KVCoreError, match="k_scale"):
        AttentionLayer(CacheId(0), query(**facts), **made({"k_scale": (), "v_scale": ()}))


@pytest.mark.parametrize(
    "table",
    [
        {"features": ("windows",)},
        {"features": "window"},
        {"dtypes": ("fp32",)},
        {"cache_dtypes": ("fp8",)},
        {"granularities": ("token",)},
    ],
)
def test_a_word_that_no_query_says_is_refused_where_it_is_written(table: dict[str, object]) -> None:
    with pytest.raises(KVCoreError) as caught:
        Capabilities(**table)
    assert [caught.value.field] == list(table)
    assert caught.value.allowed
    assert caught.value.remedy


def test_every_feature_can_be_asked_for_and_no_other() -> None:
    everything = query(
        mask=Mask(False, 4, 8),
        scale=0.3,
        softcap=2.0,
        alibi=True,
        sinks=True,
        quant="tensor",
        lse=True,
        graph_capture=True,
        head_dim_v=4,
    )
    assert set(everything.features()) == {f.value for f in Feature}
    assert query().features() == {}


def test_an_error_and_a_refusal_say_the_same() -> None:
    refusal = Refusal("cache.block_size", 24, [16, 32], "set cache.block_size=16", "24 does not divide")
    error = ConfigError.of(refusal)
    assert error.refusal == refusal
    assert ConfigError.of(error.refusal).as_dict() == error.as_dict()
