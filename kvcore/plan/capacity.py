"""How many tokens and sequences a config holds: the same bounds that admission uses at run time."""

# ruff: noqa: RUF009  (`key` makes a dataclass field)
from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvcore.plan.config import KVCacheConfig, slots_bytes
from kvcore.settings.key import check, key
from kvcore.spec.dtypes import ceil_div

# Lengths are int32 in the batch.
LONGEST = 2**31 - 1

if TYPE_CHECKING:
    # The user may leave it to the model; it is a number before anything is planned.
    Length = int
else:
    Length = int | None


@dataclass(frozen=True)
class Limits:
    """What the engine will ask of the cache; the keys `engine.*`."""

    max_model_len: Length = key(None, "longest sequence in tokens; default: the model's limit", least=1, most=LONGEST)
    max_num_batched_tokens: int = key(2048, "most tokens scheduled in one step", least=1, most=LONGEST)
    max_num_seqs: int = key(256, "most requests in one step", least=1, most=LONGEST)

    def __post_init__(self) -> None:
        check(self, "engine")


@dataclass(frozen=True)
class Capacity:
    """Capacity of one rank's config. Units are *ids* under `slots`, *large pages* under `packed`."""

    config: KVCacheConfig
    limits: Limits

    @property
    def total(self) -> int:
        """Units of the arena, the null block or large page 0 included; 0 for an arena without one."""
        return self.config.num_large_pages if self._packed else self.config.num_blocks

    @property
    def usable(self) -> int:
        """Units that requests can be given: all but the null block, or large page 0."""
        return max(0, self.total - 1)

    @property
    def _packed(self) -> bool:
        return self.config.placement == "packed"

    @property
    def unit_bytes(self) -> int:
        """Bytes of one unit in all tensors."""
        if self._packed:
            return self.config.large_page_bytes
        return sum(t.block_stride for t in self.config.kv_cache_tensors)

    def arena_bytes(self, units: int) -> int:
        """Bytes of an arena of `units` units, null block or large page 0 included."""
        if self._packed:
            return units * self.config.large_page_bytes
        return slots_bytes([t.block_stride for t in self.config.kv_cache_tensors], units)

    def resident(self, tokens: int) -> list[int]:
        """Per group, blocks that one sequence of `tokens` tokens holds between steps."""
        return [g.spec.retention.resident_blocks(tokens, g.block_size) for g in self.config.kv_cache_groups]

    def step_peak(self, tokens: int) -> list[int]:
        """Per group, blocks that one sequence holds in the step that brings it to `tokens`."""
        scheduled = min(tokens, self.limits.max_num_batched_tokens)
        return [g.spec.retention.blocks_for_step(tokens, scheduled, g.block_size) for g in self.config.kv_cache_groups]

    def reserve(self, sequences: int | None = None) -> list[int]:
        """Per group, the step budget: one for all requests together, not one each.

        Args:
            sequences: Requests that share a step; `max_num_seqs` when None, and never more than that.
        """
        most = self.limits.max_num_seqs
        requests = most if sequences is None else min(sequences, most)
        scheduled = self.limits.max_num_batched_tokens
        return [g.spec.retention.step_budget(scheduled, g.block_size, requests) for g in self.config.kv_cache_groups]

    def units(self, blocks: list[int]) -> int:
        """Units that hold these blocks of each group."""
        if not self._packed:
            return sum(blocks)
        rulers = [g.blocks_per_large_page for g in self.config.kv_cache_groups]
        return sum(ceil_div(b, a) for b, a in zip(blocks, rulers, strict=True))

    def needed_units(self, tokens: int) -> int:
        """Units that one sequence of `tokens` tokens needs at its worst step."""
        return self.units(self.step_peak(tokens))

    def fits(self, tokens: int) -> bool:
        """Whether one sequence of `tokens` tokens can be served at all."""
        return self.needed_units(tokens) <= self.usable

    def longest(self) -> int:
        """The longest length that fits; 0 when not even one token does."""
        return last_true(self.fits, LONGEST)

    def units_at_once(self, count: int, tokens: int) -> int:
        """Units that `count` sequences of `tokens` tokens take, with the step budget they share."""
        held, kept = self.resident(tokens), self.reserve(count)
        return self.units([count * h + k for h, k in zip(held, kept, strict=True)])

    def simultaneous(self, tokens: int) -> int:
        """Whole sequences of `tokens` tokens at once, the step budget kept free."""
        # Where nothing is held between steps, what limits is the step, and with it max_num_seqs.
        limit = max(self.usable, 1) * 256 if any(self.resident(tokens)) else self.limits.max_num_seqs
        most = last_true(lambda count: self.units_at_once(count, tokens) <= self.usable, limit)
        return max(most, int(self.fits(tokens)))

    def concurrency(self, tokens: int) -> float:
        """As `simultaneous`, before rounding down: with the share of one more sequence that is left."""
        whole = self.simultaneous(tokens)
        taken, more = self.units_at_once(whole, tokens), self.units_at_once(whole + 1, tokens)
        left = self.usable - taken
        return whole + (left / (more - taken) if 0 < left < more - taken else 0.0)


def last_true(holds: Callable[[int], bool], limit: int) -> int:
    """The largest n in 0 .. limit with `holds(n)`, which must be monotonic; 0 when `holds(1)` fails."""
    low, high = 0, 1
    while high <= limit and holds(high):
        low, high = high, high * 2
    high = min(high, limit + 1)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
