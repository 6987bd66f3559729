from __future__ import annotations

import hashlib
import importlib.util
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import ConfigError, RequestError
from kvcore.manage.prefix.block_hash import (
    Adapter,
    BlockHasher,
    Embeddings,
    Multimodal,
    check_extras,
    encode_items,
    hash_function,
    token_array,
)


def chain(tokens, *, size=4, salt="", extras=(), **options):
    hasher = BlockHasher(size, **options)
    found = hasher.chain(salt, extras)
    hasher.extend([found], [len(tokens) // size], token_array(tokens).tobytes())
    return found.digests


def test_the_encoding_written_out_by_hand():
    def sized(data: bytes) -> bytes:
        return struct.pack("<Q", len(data)) + data

    def sha(data: bytes) -> bytes:
        return hashlib.sha256(data).digest()

    seed = sha(b"S\x02" + sized(b"sha256") + sized(b"model") + struct.pack("<Q", 2))
    root = b"R" + seed + sized("salt é".encode()) + struct.pack("<Q", 1) + sized(b"lora")
    run0, run1, run2 = (struct.pack("<2I", *run) for run in ((7, 2**32 - 1), (8, 9), (10, 11)))
    items = struct.pack("<Q", 1) + b"M" + sized(b"img") + struct.pack("<2Q", 3, 1)
    branch = b"I" + sha(root + run0) + items
    extras = [Adapter(b"lora"), Multimodal(b"img", 3, 1)]
    found = chain([7, 2**32 - 1, 8, 9, 10, 11, 12], size=2, salt="salt é", extras=extras, namespace=b"model")
    assert found == [sha(root + run0), sha(branch + run1), sha(branch + run1 + run2)]


def test_only_whole_runs_and_growth_gives_the_same_chain():
    hasher = BlockHasher(4)
    grown = hasher.chain("")
    for start in (0, 4):
        hasher.extend([grown], [1], token_array(range(start, start + 4)).tobytes())
    assert grown.digests == chain(range(11))
    assert len(grown.digests) == 2


def test_a_copy_goes_on_by_itself():
    hasher = BlockHasher(1)
    parent = hasher.chain("s")
    hasher.extend([parent], [1], token_array([5]).tobytes())
    twin = parent.copy()
    hasher.extend([parent, twin], [1, 2], token_array([6, 7, 8]).tobytes())
    assert parent.digests == chain([5, 6], size=1, salt="s")
    assert twin.digests == chain([5, 7, 8], size=1, salt="s")


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
        "embeddings": chain(tokens, extras=[Embeddings(b"a", 0, 4)]),
        "an image": chain(tokens, extras=[Multimodal(b"a", 0, 4)]),
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


items = st.one_of(
    st.builds(kind, st.binary(max_size=3), st.integers(0, 3), st.integers(1, 3)) for kind in (Multimodal, Embeddings)
)
extras = st.lists(st.builds(Adapter, st.binary(min_size=1, max_size=3)), max_size=3)


@given(st.text(max_size=4), extras, st.text(max_size=4), extras)
def test_the_root_encoding_is_unambiguous(salt_a, extras_a, salt_b, extras_b):
    hasher = BlockHasher(4)
    same = salt_a == salt_b and sorted(e.digest for e in extras_a) == sorted(e.digest for e in extras_b)
    assert (hasher.encode_root(salt_a, extras_a) == hasher.encode_root(salt_b, extras_b)) == same


@given(st.lists(items, max_size=3), st.lists(items, max_size=3))
def test_the_item_encoding_is_unambiguous(a, b):
    def inside(found):
        reaching = [m for m in found if m.offset < 4 and m.offset + m.length > 2]
        return sorted(map(repr, reaching))

    assert (encode_items(a, 2, 4) == encode_items(b, 2, 4)) == (inside(a) == inside(b))


@pytest.mark.parametrize("bad", [[-1], [2**32], [1.5], ["a"], [None]])
def test_token_ids_are_checked(bad):
    with pytest.raises(RequestError) as caught:
        token_array(bad)
    assert caught.value.field == "token_ids"


@pytest.mark.parametrize(
    "bad",
    [Adapter("name"), Adapter(b""), Embeddings(b"", 0, 1), Multimodal(b"i", -1, 1), Multimodal(b"i", 0, 0), "lora"],
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
            hash_function("xxh3-128")
    else:
        assert len(chain(range(8), name="xxh3-128")[0]) == 16


def test_the_other_digest_length_works(monkeypatch):
    import sys
    import types

    monkeypatch.setitem(sys.modules, "xxhash", types.SimpleNamespace(xxh3_128=hashlib.md5))
    assert [len(d) for d in chain(range(8), name="xxh3-128")] == [16, 16]


facts = st.tuples(
    st.text(max_size=2),
    st.lists(st.one_of(st.builds(Adapter, st.binary(min_size=1, max_size=2)), items), max_size=2),
    st.lists(st.integers(0, 2), min_size=4, max_size=4),
)


@given(facts, facts)
def test_keys_are_equal_exactly_for_equal_contexts(a, b):
    """What a key stands for: salt, adapters, tokens, and the items over each run and those before it."""

    def context(salt, extras, tokens, run):
        adapters = sorted(e.digest for e in extras if isinstance(e, Adapter))
        over = [
            sorted(
                repr(e) for e in extras if not isinstance(e, Adapter) and e.offset < i + 2 and e.offset + e.length > i
            )
            for i in range(0, run + 2, 2)
        ]
        return salt, adapters, tokens[: run + 2], over

    for i, (x, y) in enumerate(zip(*(chain(t, size=2, salt=s, extras=e) for s, e, t in (a, b)), strict=True)):
        assert (x == y) == (context(*a, 2 * i) == context(*b, 2 * i))
