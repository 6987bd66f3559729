"""Contents, dtypes and specs: bytes by hand, and what is impossible is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kvcore.errors import KVCoreError, SpecError
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, Latent, Quant, State
from kvcore.spec.dtypes import DTYPES, nbytes
from kvcore.spec.retention import Chunk, Encoder, Full, Latest, Window

STATE = State(("s",), ((2, 2),), ("float32",))


def test_widths_are_those_of_the_storage_types() -> None:
    torch = pytest.importorskip("torch")
    for d in DTYPES.values():
        stored = torch.empty(0, dtype=getattr(torch, d.torch_name))
        assert stored.element_size() * 8 == max(d.bits, 8)
        assert stored.is_floating_point() == d.is_float


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (KVHeads(8, 128, dtype="bfloat16"), 4096),
        (KVHeads(8, 128, 64, dtype="float32"), 8 * 192 * 4),
        (KVHeads(8, 128, dtype="fp8_e4m3", quant=Quant()), 2048),
        (KVHeads(8, 128, dtype="int8", quant=Quant("token_head")), 2048 + 64),
        (KVHeads(8, 128, dtype="int4", quant=Quant("token_head")), 1024 + 64),
        (Latent(512, 64), 1152),  # DeepSeek-V3: 576 elements of 2 bytes
    ],
)
def test_bytes_of_one_token(content: KVHeads, expected: int) -> None:
    assert content.bytes_per_token == expected


@pytest.mark.parametrize(
    ("spec", "kind"),
    [
        (KVCacheSpec(KVHeads(1, 8), Full()), "full"),
        (KVCacheSpec(KVHeads(1, 8), Window(4)), "window"),
        (KVCacheSpec(KVHeads(1, 8), Chunk(4)), "chunk"),
        (KVCacheSpec(KVHeads(1, 8), Encoder(4)), "encoder"),
        (KVCacheSpec(Latent(8, 2), Full()), "latent"),
        (KVCacheSpec(STATE, Latest()), "state"),
    ],
)
def test_kinds(spec: KVCacheSpec, kind: str) -> None:
    assert spec.kind == kind


def test_cache_ids_read_well() -> None:
    assert str(CacheId(3)) == "L3"
    assert str(CacheId(3, "cross")) == "L3.cross"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: KVHeads(0, 8), "num_kv_heads"),
        (lambda: KVHeads(2, -8), "head_dim"),
        (lambda: KVHeads(2, 8, 0), "head_dim_v"),
        (lambda: KVHeads(2, 8, dtype="float15"), "dtype"),
        (lambda: KVHeads(2, 8, dtype="int8"), "cache.dtype"),
        (lambda: KVHeads(2, 8, dtype="float16", quant=Quant()), "cache.dtype"),
        (lambda: Quant("row"), "cache.scales"),  # type: ignore[arg-type]
        (lambda: Latent(0, 8), "rank"),
        (lambda: Latent(8, -1), "rope_dim"),
        (lambda: Latent(8, 1, "half"), "dtype"),
        (lambda: State((), (), ()), "State"),
        (lambda: State(("a",), ((1,), (2,)), ("float32",)), "State"),
        (lambda: State(("a", "a"), ((1,), (2,)), ("float32", "float32")), "State"),
        (lambda: State(("a",), ((0,),), ("float32",)), "shape"),
        (lambda: State(("a",), ((1,),), ("float15",)), "dtype"),
        (lambda: KVCacheSpec(STATE, Full()), "retention"),
        (lambda: KVCacheSpec(KVHeads(1, 8), Latest()), "retention"),
        (lambda: nbytes("int4", 3), "dtype"),
    ],
)
def test_the_impossible_is_refused_by_field(make: Callable[[], object], field: str) -> None:
    with pytest.raises(SpecError) as info:
        make()
    assert info.value.field == field


def test_an_error_says_what_was_given_what_is_allowed_and_what_to_do() -> None:
    error = KVCoreError("no", field="cache.x", got={"a": (1, None)}, allowed={2}, remedy="try 2")
    assert str(error) == "no; field: cache.x; got: {'a': (1, None)}; allowed: 2; remedy: try 2"
    assert error.as_dict()["error"] == {
        "type": "KVCoreError",
        "message": "no",
        "field": "cache.x",
        "got": {"a": [1, None]},
        "allowed": [2],
        "remedy": "try 2",
    }
