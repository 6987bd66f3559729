"""The bound of what a manager does for new blocks: digests, insertions and array writes, and nothing else."""

from __future__ import annotations

import hashlib
from array import array
from typing import Any

import numpy as np

SIZE, RUNNING = 16, 256  # tokens of a block, requests of a step


class Bare:
    """The digests, insertions and array writes of new blocks, and nothing else."""

    def __init__(self, groups: int = 1) -> None:
        self.hashes = [hashlib.sha256(b"root") for _ in range(RUNNING)]
        self.indices: list[dict[bytes, int]] = [{} for _ in range(groups)]
        self.owners: list[bytes | None] = [None] * 400_000
        self.refs, self.table = np.zeros(400_000, np.int32), np.zeros(400_000, np.int32)
        self.tokens, self.known = np.zeros((RUNNING, 2048), np.uint32), np.zeros(RUNNING, np.int64)
        self.made = 0

    def blocks(self) -> None:
        """A step in which each of 256 requests fills a block of every group."""
        self.made += 1
        digests = []
        for running in self.hashes:
            running.update(bytes(SIZE * 4 - 4) + self.made.to_bytes(4, "little"))
            digests.append(running.digest())
        for group, index in enumerate(self.indices):
            first = (self.made * len(self.indices) + group) * RUNNING
            self.insert(index, digests, np.arange(first, first + RUNNING))

    def insert(self, index: dict[bytes, int], digests: list[bytes], ids: Any) -> None:
        """New blocks that are held once, written into a table, and can be found."""
        blocks = ids.tolist()
        list(map(index.setdefault, digests, blocks))
        for block, digest in zip(blocks, digests, strict=True):
            self.owners[block] = digest
        self.refs[ids] = 1
        self.table[ids] = ids

    def decode(self) -> None:
        """A token each."""
        self.tokens[np.arange(RUNNING), self.known] = 7
        self.known += 1

    def free(self, ids: Any) -> None:
        """Blocks lose their holder and line up to be handed out again."""
        self.refs[ids] = 0
        self.table[ids] = np.arange(len(ids))
        self.table[: len(ids)] = ids

    def life(self, prompt: list[int]) -> None:
        """A prompt of which all blocks but the last eight are cached, 64 new tokens, and its end."""
        digests, running = chain_of(prompt), self.hashes[0]
        list(map(self.indices[0].get, digests))
        for i in range(4):  # blocks of new tokens
            running.update(bytes(SIZE * 4 - 4) + i.to_bytes(4, "little"))
            digests.append(running.digest())
        blocks = np.arange(len(digests))
        self.insert(self.indices[0], digests[-12:], blocks[-12:])
        self.refs[blocks] = 1
        self.decode()  # a step of 64 requests for each of its tokens
        self.free(blocks)


def chain_of(prompt: list[int]) -> list[bytes]:
    """From ids to the digests of whole blocks."""
    data, running, found = array("I", prompt).tobytes(), hashlib.sha256(b"root"), []
    for start in range(0, len(prompt) // SIZE * SIZE * 4, SIZE * 4):
        running.update(data[start : start + SIZE * 4])
        found.append(running.digest())
    return found
