"""What vLLM's start-up log would say of the same caches and bytes, and where that differs from our own plan.

vLLM puts layers of one kind into groups of equal width, fills the last of them with padding layers that take memory,
and gives all groups one pool of blocks (its `kv_cache_utils.py`). Its log has counted tokens in three ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kvcore.errors import ConfigError, LayoutError
from kvcore.plan.capacity import LONGEST, Limits, last_true
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.dtypes import ceil_div, round_up
from kvcore.spec.retention import Chunk, Encoder, Full, Latest, Striped, Window

# pre_hybrid: every layer has its own blocks, and needs what it can hold (to 0.9). min_block: blocks over groups, in
# tokens (0.10 to 0.18). concurrency: sequences of the longest length, in tokens (since).
Version = Literal["pre_hybrid", "min_block", "concurrency"]
VERSIONS: tuple[str, ...] = get_args(Version)
BLOCK = 16
# Kinds whose numbers of layers differ by less are all padded to the larger.
NEARLY_EQUAL = 1.25


@dataclass(frozen=True)
class VllmGroup:
    """Layers of one kind that share a block table there.

    Attributes:
        spec: What each of them stores.
        layers: Layers of the model.
        padding: Layers that only take memory.
        block_size: Tokens of a block.
    """

    spec: KVCacheSpec
    layers: int
    padding: int
    block_size: int


@dataclass(frozen=True)
class VllmPlan:
    """vLLM's figures for one rank.

    Attributes:
        version: Whose log it is.
        groups: Its groups.
        block_bytes: Bytes of a block in all layers of a group.
        num_blocks: Blocks, its null block included.
        limits: What was asked.
        state_blocks: Blocks of one request in a group of states.
    """

    version: Version
    groups: tuple[VllmGroup, ...]
    block_bytes: int
    num_blocks: int
    limits: Limits
    state_blocks: int = 1

    def blocks_per_request(self, tokens: int) -> int:
        """Blocks of one sequence in all groups."""
        return sum(self._blocks(g, tokens) for g in self.groups)

    def _blocks(self, group: VllmGroup, tokens: int) -> int:
        retention, size = group.spec.retention, group.block_size
        scheduled = self.limits.max_num_batched_tokens
        if isinstance(retention, Latest):
            return self.state_blocks
        if isinstance(retention, Window):
            return ceil_div(min(retention.size - 1 + scheduled, tokens), size) + 1
        if isinstance(retention, Chunk):
            return ceil_div(min(retention.size + scheduled, tokens), size)
        return ceil_div(retention.max_tokens if isinstance(retention, Encoder) else tokens, size)

    def needed_bytes(self, tokens: int) -> int:
        """Bytes that its check asks for one sequence."""
        if self.version != "pre_hybrid":
            return self.blocks_per_request(tokens) * self.block_bytes
        return sum(self._blocks(g, tokens) * _page(g.spec, g.block_size) * g.layers for g in self.groups)

    @property
    def concurrency(self) -> float:
        """Sequences of `max_model_len` tokens at once, as logged."""
        longest = self.limits.max_model_len
        if self.version == "pre_hybrid":
            return self.num_blocks / ceil_div(longest, self.groups[0].block_size)
        return self.num_blocks / self.blocks_per_request(longest)

    @property
    def tokens(self) -> int:
        """The size of the cache in tokens, as logged."""
        if self.version == "concurrency" and len(self.groups) > 1:
            return int(self.concurrency * self.limits.max_model_len)
        if self.version == "pre_hybrid":
            return self.num_blocks * self.groups[0].block_size
        sizes = [g.block_size for g in self.groups if not g.spec.content.per_request]
        return self.num_blocks // len(self.groups) * min(sizes, default=1)

    def longest(self, memory: int) -> int:
        """The length that its error message estimates to fit `memory` bytes."""
        return last_true(lambda tokens: self.needed_bytes(tokens) <= memory, LONGEST)

    def as_dict(self, memory: int) -> dict[str, Any]:
        """For JSON."""
        longest = self.limits.max_model_len
        return {
            "engine": "vllm",
            "version": self.version,
            "num_blocks": self.num_blocks,
            "block_bytes": self.block_bytes,
            "blocks_per_request": self.blocks_per_request(longest),
            "tokens": self.tokens,
            "max_concurrency": round(self.concurrency, 2),
            "needed_bytes": self.needed_bytes(longest),
            "fits": self.needed_bytes(longest) <= memory,
            "max_model_len_fits": self.longest(memory),
            "groups": [
                {"kind": g.spec.kind, "layers": g.layers, "padding_layers": g.padding, "block_size": g.block_size}
                for g in self.groups
            ],
        }


def vllm_plan(
    caches: Mapping[CacheId, KVCacheSpec],
    memory: int,
    limits: Limits,
    *,
    version: str,
    block_size: int | None = None,
    prefix_caching: bool = True,
) -> VllmPlan:
    """VLLM's plan of the caches that one rank owns.

    Args:
        caches: Them, of the layers that its check charges to the rank.
        memory: Bytes of the arena.
        limits: Longest sequence, step budget.
        version: One of `VERSIONS`.
        block_size: Tokens of a block; None is 16.
        prefix_caching: With it a state takes two blocks, the running one and the one that is kept.

    Raises:
        ConfigError: There is no such version.
        LayoutError: vLLM has no plan for these caches.
    """
    known: dict[str, Version] = {"pre_hybrid": "pre_hybrid", "min_block": "min_block", "concurrency": "concurrency"}
    if version not in known:
        raise ConfigError("there is no such accounting", field="plan.accounting_version", got=version, allowed=VERSIONS)
    size = block_size or BLOCK
    kinds: dict[KVCacheSpec, int] = {}
    for spec in caches.values():
        kinds[spec] = kinds.get(spec, 0) + 1
    per_layer = version == "pre_hybrid" or all(isinstance(s.retention, Full | Striped) for s in kinds)
    if per_layer and not any(isinstance(s.retention, Latest) for s in kinds):
        groups = tuple(VllmGroup(spec, count, 0, size) for spec, count in kinds.items())
        each = sum(_page(spec, size) * count for spec, count in kinds.items())
        uniform = groups if version == "pre_hybrid" else groups[:1]
        return VllmPlan(known[version], uniform, each, memory // each, limits)
    wide, sizes, page = _group_size(list(kinds.values())), *_block_sizes(kinds, size)
    groups = tuple(
        VllmGroup(spec, layers, wide - layers, sizes[spec])
        for spec, count in kinds.items()
        for layers in _split(count, wide)
    )
    each = wide * page
    return VllmPlan(known[version], groups, each, memory // each, limits, 2 if prefix_caching else 1)


def _page(spec: KVCacheSpec, block_size: int) -> int:
    """Bytes of one block in one layer."""
    content = spec.content
    return content.bytes_per_request if content.per_request else content.bytes_per_token * block_size


def _group_size(counts: list[int]) -> int:
    """The fewest layers of a kind, or the most where the kinds have nearly as many."""
    least, most = min(counts), max(counts)
    return most if most < least * NEARLY_EQUAL else least


def _split(count: int, wide: int) -> list[int]:
    """Layers of each group; the last has what is left."""
    return [min(wide, count - first) for first in range(0, count, wide)]


def _block_sizes(kinds: Mapping[KVCacheSpec, int], size: int) -> tuple[dict[KVCacheSpec, int], int]:
    """Tokens of a block of each kind, and the bytes that a page of all kinds takes."""
    states = [_page(s, size) for s in kinds if s.content.per_request]
    paged = {s: _page(s, size) for s in kinds if not s.content.per_request}
    if not paged:
        return dict.fromkeys(kinds, 1), max(states)
    if states:  # attention blocks grow until a state fits into one
        per_token = max(s.content.bytes_per_token for s in paged)
        size = max(size, round_up(ceil_div(max(states), per_token), size))
        paged = {s: _page(s, size) for s in paged}
    largest = max(paged.values())
    uneven = [s for s, nbytes in paged.items() if largest % nbytes]
    if uneven:
        raise LayoutError(
            "vLLM has no plan for pages that do not divide the largest one",
            field="plan.accounting",
            got=sorted(set(paged.values())),
            allowed=f"divisors of {largest}",
            remedy="leave out plan.accounting",
        )
    return {s: size * (largest // paged[s]) if s in paged else 1 for s in kinds}, largest


def differences(theirs: VllmPlan, ours: int, our_tokens: int) -> list[str]:
    """Why the two plans differ, in words.

    Args:
        theirs: vLLM's.
        ours: Whole sequences of `max_model_len` tokens in our plan.
        our_tokens: The same before rounding, in tokens.
    """
    found: list[str] = []
    why: list[tuple[Callable[[VllmGroup], bool], str]] = [
        (lambda g: g.padding > 0, "groups of equal width have {n} padding layers, which take memory and hold nothing"),
        (
            lambda g: isinstance(g.spec.retention, Window | Chunk),
            "a window is charged a whole step for each of its requests; here requests share one step",
        ),
        (
            lambda g: isinstance(g.spec.retention, Latest),
            "a state takes a block of attention, whose blocks grow until one fits",
        ),
    ]
    for holds, text in why:
        hits = [g for g in theirs.groups if holds(g)]
        if hits:
            found.append(text.format(n=sum(g.padding for g in hits)))
    found.append(
        f"vLLM ({theirs.version}): {theirs.tokens} tokens, {theirs.concurrency:.2f} sequences; here {our_tokens} "
        f"tokens, {ours} whole sequences, the null block and the step budget kept free"
    )
    return found
