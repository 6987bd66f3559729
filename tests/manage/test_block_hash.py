from __future__ import annotations

import hashlib
import importlib.util
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError, RequestError
from kvcore.manage.block_hash import (
    Adapter,
    BlockHasher,
    Multimodal,
    check_extras,
    encode_items,
    hash_function,
    token_array,
)


def chain(tokens, *, size=4, salt="", extras=(), **options):
    hasher = BlockHasher(size, **options)
    digests: list[bytes] = []
    items = [e for e in extras if isinstance(e, Multimodal)]
    hasher.extend(digests, hasher.root(salt, extras), token_array(tokens), items)
    return digests


def test_the_encoding_written_out_by_hand():
    def sized(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    def sha(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    seed = sha(b"S\x01" + sized(b"sha256") + sized(b"model") + struct.pack("<Q", 2))
    root = sha(b"R" + seed + sized("salt é".encode()) + b"A" + sized(b"lora"))
    first = sha(b"B" + root + struct.pack("<2I", 7, 2**32 - 1))
    second = sha(b"B" + first + struct.pack("<2I", 8, 9) + b"M" + sized(b"img") + struct.pack("<2Q", 3, 5))
    extras = [Adapter(b"lora"), Multimodal(b"img", 3, 5)]
    found = chain([7, 2**32 - 1, 8, 9, 10], size=2, salt="salt é", extras=extras, namespace=b"model")
    assert found == [first, second]


def test_only_whole_runs_and_growth_gives_the_same_chain():
    hasher = BlockHasher(4)
    root = hasher.root("")
    tokens, grown = token_array([]), []
    for token in range(11):
        tokens.append(token)
        hasher.extend(grown, root, tokens)
    assert grown == chain(range(11))
    assert len(grown) == 2


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_digests_are_equal_exactly_where_the_prefixes_are(a, b):
    for i, (x, y) in enumerate(zip(chain(a, size=2), chain(b, size=2), strict=False)):
        assert (x == y) == (a[: 2 * i + 2] == b[: 2 * i + 2])


def test_what_sets_prefixes_apart():
    tokens = list(range(8))
    image = Multimodal(b"i", 5, 2)
    chains = {
        "plain": chain(tokens),
        "salt": chain(tokens, salt="a"),
        "adapter named as the salt": chain(tokens, extras=[Adapter(b"a")]),
        "other adapter": chain(tokens, extras=[Adapter(b"b")]),
        "two adapters": chain(tokens, extras=[Adapter(b"a"), Adapter(b"b")]),
        "joined adapter": chain(tokens, extras=[Adapter(b"ab")]),
        "namespace": chain(tokens, namespace=b"a"),
    }
    firsts = [c[0] for c in chains.values()]
    assert len(set(firsts)) == len(firsts)
    assert chain(tokens, extras=[Adapter(b"a"), Adapter(b"b")]) == chain(tokens, extras=[Adapter(b"b"), Adapter(b"a")])
    with_image = chain(tokens, extras=[image])
    assert with_image[0] == chains["plain"][0]  # the image begins in the second run
    assert with_image[1] != chains["plain"][1]
    for other in (Multimodal(b"j", 5, 2), Multimodal(b"i", 4, 2), Multimodal(b"i", 5, 3)):
        assert chain(tokens, extras=[other])[1] != with_image[1]
    assert chain(tokens, size=2)[3] != chains["plain"][1]


items = st.builds(Multimodal, st.binary(max_size=3), st.integers(0, 3), st.integers(1, 3))
extras = st.lists(st.builds(Adapter, st.binary(min_size=1, max_size=3)), max_size=3)


@given(st.text(max_size=4), extras, st.text(max_size=4), extras)
def test_the_root_encoding_is_unambiguous(salt_a, extras_a, salt_b, extras_b):
    hasher = BlockHasher(4)
    same = salt_a == salt_b and sorted(e.digest for e in extras_a) == sorted(e.digest for e in extras_b)
    assert (hasher.encode_root(salt_a, extras_a) == hasher.encode_root(salt_b, extras_b)) == same


@given(st.lists(items, max_size=3), st.lists(items, max_size=3))
def test_the_item_encoding_is_unambiguous(a, b):
    def inside(found):
        return sorted((m.offset, m.identifier, m.length) for m in found if m.offset < 4 and m.offset + m.length > 2)

    assert (encode_items(a, 2, 4) == encode_items(b, 2, 4)) == (inside(a) == inside(b))


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["a"], [None]])
def test_token_ids_are_checked(bad):
    with pytest.raises(RequestError) as caught:
        token_array(bad)
    assert caught.value.field == "token_ids"


@pytest.mark.parametrize(
    "bad", [Adapter("name"), Adapter(b""), Multimodal(b"i", -1, 1), Multimodal(b"i", 0, 0), "lora"]
)
def test_extras_are_checked(bad):
    with pytest.raises(RequestError):
        check_extras([bad])


def test_unknown_hash():
    with pytest.raises(ConfigError) as caught:
        hash_function("md5")
    assert caught.value.field == "cache.hash"
    assert "sha256" in caught.value.allowed


def test_xxh3_works_or_says_what_is_missing():
    if importlib.util.find_spec("xxhash") is None:
        with pytest.raises(ConfigError, match="pip install xxhash"):
            hash_function("xxh3")
    else:
        assert len(chain(range(8), name="xxh3")[0]) == 16


def test_the_other_digest_length_works(monkeypatch):
    import sys
    import types

    fake = types.SimpleNamespace(xxh3_128_digest=lambda data: hashlib.md5(data).digest())
    monkeypatch.setitem(sys.modules, "xxhash", fake)
    assert [len(d) for d in chain(range(8), name="xxh3")] == [16, 16]
