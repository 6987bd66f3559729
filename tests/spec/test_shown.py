"""Layers in words, as they are; numbers in the order of numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.attention.query import AttentionQuery, Capabilities
from kvcore.errors import ConfigError, natural
from kvcore.spec.cache_spec import CacheId, shown


@pytest.mark.parametrize(
    ("layers", "words"),
    [
        ([3], "L3"),
        ([0, 1], "L0, L1"),
        ([0, 2], "L0, L2"),
        (range(30), "L0 to L29"),
        (range(0, 24, 2), "L0, L2, ..., L22"),
        ([5, 11, 17, 23], "L5, L11, ..., L23"),
        ([5, 11, 17], "L5, L11, L17"),
        ([0, 2, 3, 4, 5], "L0, L2 to L5"),
        ([i for i in range(12) if i % 6 != 5], "L0 to L4, L6 to L10"),
        ([i for i in range(40) if i % 4 < 2], "L0, L1, L4, L5, L8, L9 and 14 more"),
    ],
)
def test_layers_are_shown_as_they_are(layers: Sequence[int], words: str) -> None:
    assert shown([CacheId(i) for i in layers]) == words


def test_roles_are_kept_apart() -> None:
    assert shown([CacheId(i, "indexer") for i in range(5)]) == "L0.indexer to L4.indexer"
    assert shown([CacheId(i, role) for i in (0, 1) for role in ("self", "cross")]) == "L0, L0.cross, L1, L1.cross"


def read(words: str) -> list[int]:
    """The layers that words name, as a reader would list them."""
    found: list[int] = []
    pieces = words.split(", ")
    for i, piece in enumerate(pieces):
        if piece == "...":
            step, last = found[-1] - found[-2], int(pieces[i + 1][1:])
            found += range(found[-1] + step, last, step)
        elif " to " in piece:
            first, last = (int(p[1:]) for p in piece.split(" to "))
            found += range(first, last + 1)
        else:
            found.append(int(piece[1:]))
    return found


@given(st.sets(st.integers(0, 60), min_size=1))
def test_what_is_shown_can_be_read_back(layers: set[int]) -> None:
    words, _, more = shown([CacheId(i) for i in sorted(layers)]).partition(" and ")
    named = read(words)
    assert named == sorted(layers)[: len(named)]
    assert len(layers) == len(named) + int(more.removesuffix(" more") or 0)


def test_numbers_are_sorted_as_numbers() -> None:
    mixed = [256, 64, 128, 0.5, 0.25, -1, "layer10.w", "layer2.w", None]
    assert sorted(mixed, key=natural) == [-1, 0.25, 0.5, 64, 128, 256, None, "layer2.w", "layer10.w"]
    table = Capabilities(dtypes=("float16",), head_dims=(256, 64, 128))
    refused = table.check(AttentionQuery("kv", "float16", "float16", 4, 2, 96, 96))
    assert refused is not None
    assert refused.allowed == [64, 128, 256]
    error = ConfigError("no", allowed={128, 1024, 64, 16})
    assert "allowed: 16, 64, 128, 1024" in str(error)
    assert error.as_dict()["error"]["allowed"] == [16, 64, 128, 1024]


def test_a_value_of_thousands_of_signs_is_cut_for_people_alone() -> None:
    error = ConfigError("no", got="M*" * 10_000)
    assert len(str(error)) < 500
    assert "(20000 characters)" in str(error)
    assert error.as_dict()["error"]["got"] == "M*" * 10_000
