"""Prefix keys: what stands for "these tokens, under these conditions, in this model".

The bytes that are hashed are canonical and unambiguous: every part has a tag, and a fixed length or a
length prefix, so that two unlike prefixes never encode alike, and equal ones always do.

::

    seed  = H( "S" | version | hash name | namespace | tokens a digest )
    text  = "R" | seed | salt | adapters                 then every token, uint32, little endian
    d[i]  = H( text up to the end of run i )

A run of tokens under an item (an image, embeddings) starts a text of its own, and later runs go on with that one::

    text  = "I" | H( text so far ) | items over run i    then every token from run i on

So a digest costs one more run of bytes of one running hash, not a hash of its own; and a request adds its
digests as its tokens come.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Protocol

import numpy as np

from kvcore.errors import ConfigError, RequestError
from kvcore.manage.ragged import Ints

HASHES = ("sha256", "xxh3-128")
_VERSION = 2
TOKEN_TYPE = np.dtype("<u4")  # little endian on every machine: their bytes are hashed as they lie
_ARRAY_CODE = next(code for code in "IL" if array(code).itemsize == TOKEN_TYPE.itemsize)


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that the whole request runs with, by digest of its weights, never by its name."""

    digest: bytes


@dataclass(frozen=True)
class Multimodal:
    """Placeholder tokens ``[offset, offset + length)`` stand for an image, a sound, ... `identifier`."""

    identifier: bytes
    offset: int
    length: int


@dataclass(frozen=True)
class Embeddings:
    """Vectors of this digest stand in place of tokens ``[offset, offset + length)`` (prompt embeddings)."""

    digest: bytes
    offset: int
    length: int


Item = Multimodal | Embeddings
Extra = Adapter | Item


class Hash(Protocol):
    """A running hash, as `hashlib` and `xxhash` have them."""

    def update(self, data: bytes, /) -> None:
        """Hash more bytes."""

    def digest(self) -> bytes:
        """Of all bytes so far."""

    def copy(self) -> Hash:
        """A hash that goes on from here by itself."""


def hash_function(name: str) -> Callable[[bytes], Hash]:
    """The hash called `name`: ``sha256`` resists collisions on purpose; ``xxh3-128`` is for a single trusted tenant.

    Raises:
        ConfigError: The hash is unknown, or its package is not installed.
    """
    if name == "sha256":
        return hashlib.sha256
    if name != "xxh3-128":
        raise ConfigError("unknown hash", field="cache.hash", got=name, allowed=HASHES)
    try:
        xxhash = import_module("xxhash")  # no requirement of ours
    except ImportError:
        raise ConfigError(
            "the package xxhash is not installed",
            field="cache.hash",
            got=name,
            allowed="sha256",
            remedy="pip install xxhash, or set cache.hash=sha256",
        ) from None
    found: Callable[[bytes], Hash] = xxhash.xxh3_128
    return found


def token_array(tokens: Sequence[int] | Ints) -> Ints:
    """Token ids as uint32; `RequestError` for anything else."""
    if isinstance(tokens, np.ndarray):
        if tokens.dtype == np.uint32 and tokens.ndim == 1:
            return tokens
        tokens = tokens.tolist()
    try:
        return np.frombuffer(array(_ARRAY_CODE, tokens), np.uint32)
    except (OverflowError, TypeError) as error:
        raise RequestError(
            "token ids must be integers of 32 bits", field="token_ids", got=str(error), allowed="0 .. 2**32 - 1"
        ) from None


def _sized(data: bytes) -> bytes:
    return _number(len(data)) + data


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little")


class Chain:
    """The digests of one request so far, and the hash that runs over it.

    Attributes:
        root: What stands before its first token.
        digests: One for each whole run of tokens.
        items: What some of its tokens stand for.
    """

    __slots__ = ("digests", "items", "root", "running")

    def __init__(self, root: bytes, running: Hash, items: tuple[Item, ...] = ()) -> None:
        self.root = root
        self.digests: list[bytes] = []
        self.items = items
        self.running = running

    def has_items(self, start: int, end: int) -> bool:
        """Whether some of the tokens ``[start, end)`` stand for something else."""
        return any(i.offset < end and start < i.offset + i.length for i in self.items)

    def copy(self) -> Chain:
        """The same prefix, to go on by itself."""
        twin = Chain(self.root, self.running.copy(), self.items)
        twin.digests = self.digests[:]
        return twin


class BlockHasher:
    """Digests of whole runs of `block_size` tokens, each bound to everything before it.

    Args:
        block_size: Tokens a digest, h: the gcd of the block sizes of all groups.
        name: One of `HASHES`.
        namespace: Fingerprint of model and layout; other namespaces share nothing.
    """

    def __init__(self, block_size: int, *, name: str = "sha256", namespace: bytes = b"") -> None:
        self.block_size = block_size
        self._new = hash_function(name)
        self._run_type = np.dtype((np.void, block_size * TOKEN_TYPE.itemsize))
        self._items = False  # whether any chain has some
        head = b"S" + bytes([_VERSION]) + _sized(name.encode()) + _sized(namespace)
        self._seed = self._new(head + _number(block_size)).digest()

    def chain(self, salt: str, extras: Sequence[Extra] = ()) -> Chain:
        """The chain of a request, before its first token."""
        items = tuple(e for e in extras if not isinstance(e, Adapter))
        self._items = self._items or bool(items)
        root = self.encode_root(salt, extras)
        return Chain(root, self._new(root), items)

    def encode_root(self, salt: str, extras: Sequence[Extra]) -> bytes:
        """What every key of a request begins with: the salt, and the adapters in the order of their digests."""
        adapters = sorted(e.digest for e in extras if isinstance(e, Adapter))
        return b"R" + self._seed + _sized(salt.encode()) + _number(len(adapters)) + b"".join(map(_sized, adapters))

    def extend(self, chains: Sequence[Chain], runs: Sequence[int], data: bytes | Ints) -> list[bytes]:
        """Append the digests of the next whole runs.

        Args:
            chains: Grow.
            runs: How many, of each.
            data: Their tokens, one chain after the other: uint32, little endian, as bytes or as a contiguous array.

        Returns:
            The new digests, one chain after the other.
        """
        parts: list[bytes] = np.frombuffer(data, self._run_type, sum(runs)).tolist()
        if len(parts) == len(chains) and not self._items:  # one run each: a decode
            return [_add(chain, part) for chain, part in zip(chains, parts, strict=True)]
        found: list[bytes] = []
        for chain, count in zip(chains, runs, strict=True):
            own = parts[len(found) : len(found) + count]
            if chain.items:
                found += [self._add_with_items(chain, part) for part in own]
            else:
                update, digest = chain.running.update, chain.running.digest
                made = [(update(part), digest())[1] for part in own]
                chain.digests += made
                found += made
        return found

    def _add_with_items(self, chain: Chain, part: bytes) -> bytes:
        start = len(chain.digests) * self.block_size
        items = encode_items(chain.items, start, start + self.block_size)
        if items:
            chain.running = self._new(b"I" + chain.running.digest() + items)
        return _add(chain, part)


def _add(chain: Chain, part: bytes) -> bytes:
    running = chain.running
    running.update(part)
    digest = running.digest()
    chain.digests.append(digest)
    return digest


def encode_items(items: Sequence[Item], start: int, end: int) -> bytes:
    """The items that reach into tokens ``[start, end)``, in order of offset, then identity; empty for none."""
    inside = [
        (m.offset, b"M" + _sized(m.identifier) if isinstance(m, Multimodal) else b"E" + _sized(m.digest), m.length)
        for m in items
        if m.offset < end and start < m.offset + m.length
    ]
    told = b"".join(name + _number(offset) + _number(length) for offset, name, length in sorted(inside))
    return _number(len(inside)) + told if inside else b""


def check_extras(extras: Sequence[Extra]) -> tuple[Extra, ...]:
    """`extras` as a tuple; `RequestError` names what cannot be encoded."""
    for extra in extras:
        name = getattr(extra, "identifier", getattr(extra, "digest", None))
        good = isinstance(extra, Extra) and isinstance(name, bytes)
        if isinstance(extra, Adapter | Embeddings):
            good = good and bool(name)
        if isinstance(extra, Item):
            good = good and extra.offset >= 0 and extra.length >= 1
        if not good:
            raise RequestError(
                "this extra cannot be part of a prefix",
                field="extras",
                got=repr(extra),
                allowed="Adapter(digest), Multimodal(id, offset, length), Embeddings(digest, offset, length)",
            )
    return tuple(extras)
