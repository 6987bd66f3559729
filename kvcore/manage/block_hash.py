"""The digest chain of a request: what stands for "these tokens, under these conditions, in this model".

The bytes that are hashed are canonical and unambiguous: every part has a tag, and a fixed length or a
length prefix, so that two unlike prefixes never encode alike, and equal ones always do.

::

    seed  = H( "S" | version | hash name | namespace | tokens a digest )
    root  = H( "R" | seed | salt | adapters )
    d[i]  = H( "B" | d[i-1] or root | tokens, uint32 little endian | multimodal items over them )
"""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module

from kvcore.errors import ConfigError, RequestError

HASHES = ("sha256", "xxh3")
_VERSION = 1
TOKEN_BYTES = 4
# The array type of token ids: the unsigned type with four bytes on this machine.
TOKEN_CODE = next(code for code in "IL" if array(code).itemsize == TOKEN_BYTES)


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


Extra = Adapter | Multimodal


def hash_function(name: str) -> Callable[[bytes], bytes]:
    """The hash called `name`: ``sha256`` resists collisions on purpose; ``xxh3`` (128 bits) is faster.

    Raises:
        ConfigError: The hash is unknown, or its package is not installed.
    """
    if name == "sha256":
        return lambda data: hashlib.sha256(data).digest()
    if name != "xxh3":
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
    digest: Callable[[bytes], bytes] = xxhash.xxh3_128_digest
    return digest


def token_array(tokens: Sequence[int]) -> array[int]:
    """Token ids as four-byte integers; `RequestError` for anything else."""
    try:
        return array(TOKEN_CODE, tokens)
    except (OverflowError, TypeError) as error:
        raise RequestError(
            "token ids must be integers of 32 bits", field="token_ids", got=str(error), allowed="0 .. 2**32 - 1"
        ) from None


def _sized(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


class BlockHasher:
    """Digests of whole runs of `block_size` tokens, each bound to everything before it.

    Args:
        block_size: Tokens a digest, h: the gcd of the block sizes of all groups.
        name: ``sha256`` or ``xxh3``.
        namespace: Fingerprint of model and layout; other namespaces share nothing.
    """

    def __init__(self, block_size: int, *, name: str = "sha256", namespace: bytes = b"") -> None:
        self.block_size = block_size
        self._hash = hash_function(name)
        head = b"S" + bytes([_VERSION]) + _sized(name.encode()) + _sized(namespace)
        self._seed = self._hash(head + block_size.to_bytes(8, "little"))

    def root(self, salt: str, extras: Sequence[Extra] = ()) -> bytes:
        """The digest that the chain of a request starts from."""
        return self._hash(self.encode_root(salt, extras))

    def encode_root(self, salt: str, extras: Sequence[Extra]) -> bytes:
        """What `root` hashes: the salt, and the adapters in the order of their digests."""
        adapters = sorted(e.digest for e in extras if isinstance(e, Adapter))
        listed = b"".join(b"A" + _sized(d) for d in adapters)
        return b"R" + self._seed + _sized(salt.encode()) + listed

    def extend(self, digests: list[bytes], root: bytes, tokens: array[int], items: Sequence[Multimodal] = ()) -> None:
        """Append the digests of all whole runs of `tokens` that `digests` lacks."""
        size, hashed = self.block_size, self._hash
        parent = digests[-1] if digests else root
        for start in range(len(digests) * size, len(tokens) - size + 1, size):
            data = b"B" + parent + pack(tokens[start : start + size])
            if items:
                data += encode_items(items, start, start + size)
            parent = hashed(data)
            digests.append(parent)


def pack(tokens: array[int]) -> bytes:
    """Token ids as uint32, little endian on every machine."""
    if sys.byteorder == "big":
        tokens = tokens[:]
        tokens.byteswap()
    return tokens.tobytes()


def encode_items(items: Sequence[Multimodal], start: int, end: int) -> bytes:
    """The multimodal items that reach into tokens ``[start, end)``, in order of offset, then identifier."""
    inside = [m for m in items if m.offset < end and start < m.offset + m.length]
    inside.sort(key=lambda m: (m.offset, m.identifier, m.length))
    return b"".join(
        b"M" + _sized(m.identifier) + m.offset.to_bytes(8, "little") + m.length.to_bytes(8, "little") for m in inside
    )


def check_extras(extras: Sequence[Extra]) -> tuple[Extra, ...]:
    """`extras` as a tuple; `RequestError` names what cannot be encoded."""
    for extra in extras:
        if isinstance(extra, Adapter):
            good = isinstance(extra.digest, bytes) and bool(extra.digest)
        else:
            good = (
                isinstance(extra, Multimodal)
                and isinstance(extra.identifier, bytes)
                and extra.offset >= 0
                and extra.length >= 1
            )
        if not good:
            raise RequestError(
                "this extra cannot be part of a prefix",
                field="extras",
                got=repr(extra),
                allowed="Adapter(digest), Multimodal(id, offset, length)",
            )
    return tuple(extras)
