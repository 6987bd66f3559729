"""`summarize`: what a replay comes to, as the JSON document of `kvcore replay`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from kvcore.plan.config import KVCacheConfig
from kvcore.replay.replay import Replay
from kvcore.replay.served import Served
from kvcore.spec.retention import Full

QUANTILES = (50, 90, 99)


def summarize(replay: Replay, block_size: int) -> dict[str, Any]:
    """The figures of a finished run.

    Args:
        replay: The run.
        block_size: Tokens of a block, in which `block_hit_rate` counts.

    Returns:
        Counts, rates and times. Rates of prefixes are None where the trace tells nothing of prompts; `seconds` is how
        long the replay took, `simulated_seconds` what it replayed.
    """
    served, scheduler = replay.served, replay.scheduler
    blocks, counts = scheduler.manager.stats(), scheduler.stats
    prefixes = replay.trace.has_prefixes and counts.prompt_tokens > 0
    prompt_blocks = sum(-(-s.prompt_tokens // block_size) for s in served)
    hit_blocks = sum(s.cached_tokens // block_size for s in served)
    first = [s.first_token - s.arrived for s in served if s.first_token is not None]
    whole = [s.ended - s.arrived for s in served if s.ended is not None and not s.failed]
    events = replay.arrived + replay.steps + len(served)
    samples = replay.series.samples
    return {
        "trace": replay.trace.name,
        "requests": replay.arrived,
        "refused": len(replay.refused),
        "failed": sum(s.failed for s in served),
        "prompt_tokens": counts.prompt_tokens,
        "cached_tokens": counts.cached_tokens,
        "output_tokens": counts.output_tokens,
        "hit_rate": counts.cached_tokens / counts.prompt_tokens if prefixes else None,
        "block_hit_rate": hit_blocks / prompt_blocks if prefixes else None,
        "missed_by_reason": missed_by_reason(served),
        "steps": replay.steps,
        "simulated_seconds": replay.seconds,
        "peak_blocks": blocks["peak_blocks"],
        "total_blocks": blocks["blocks_total"],
        "evictions": blocks["evictions"],
        "preemptions": counts.preemptions,
        "waste_fraction": sum(s.waste for s in samples) / len(samples) if samples else 0.0,
        "first_token_seconds": quantiles(first),
        "request_seconds": quantiles(whole),
        "seconds": replay.wall_seconds,
        "events_per_second": events / replay.wall_seconds if replay.wall_seconds else 0.0,
    }


def missed_by_reason(served: Iterable[Served]) -> dict[str, int] | None:
    """Prompt tokens that were not reused, by reason, the most frequent first; None where nobody was told why."""
    told = [s.missed for s in served if s.missed is not None]
    counts: Counter[str] = Counter()
    for missed in told:
        counts.update(missed)
    return dict(counts.most_common()) if told else None


def block_size_of(config: KVCacheConfig) -> int:
    """Tokens of a block of the first group that keeps every token, or of the first group where none does."""
    groups = config.kv_cache_groups
    return next((g.block_size for g in groups if isinstance(g.spec.retention, Full)), groups[0].block_size)


def quantiles(values: Sequence[float]) -> dict[str, float | None]:
    """The smallest values that 50, 90 and 99 % do not exceed (nearest rank), and the largest; None without values."""
    ordered, count = sorted(values), len(values)
    found = {f"p{q}": ordered[-(-q * count // 100) - 1] if count else None for q in QUANTILES}
    return {**found, "max": ordered[-1] if count else None}
