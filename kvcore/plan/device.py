"""Where the memory of one device goes: weights, allowances, tables, and what they leave to the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kvcore.plan.capacity import Limits
from kvcore.plan.config import KVCacheConfig
from kvcore.spec.dtypes import nbytes

# Captured graphs, the driver's context and libraries, where nothing was measured.
GRAPHS = 1 << 30
# Vectors of the model's width that a step holds for each of its tokens at its peak: the residual, its norm, queries,
# keys, values, the output, and gate and up of a feed-forward layer of three times the width.
VECTORS_A_TOKEN = 12


@dataclass(frozen=True)
class DeviceTerms:
    """One device's memory in bytes; the terms and the arena add up to `total`.

    Attributes:
        total: All of it.
        reserve: What `cache.utilization` leaves to others.
        weights: What this rank holds of the weights.
        activations: Allowance for the largest step.
        graphs: Allowance for graphs, context and libraries.
        tables: Block tables and the buffers of a step.
        arena: The cache.
    """

    total: int
    reserve: int
    weights: int
    activations: int
    graphs: int
    tables: int
    arena: int = 0

    @property
    def left(self) -> int:
        """What the other terms leave to the arena; negative where they do not fit themselves."""
        return self.total - self.reserve - self.weights - self.activations - self.graphs - self.tables

    @property
    def unused(self) -> int:
        """Bytes of the arena's share that make up no whole block."""
        return self.left - self.arena

    def as_dict(self) -> dict[str, int]:
        """The terms, for JSON."""
        return {
            "total": self.total,
            "reserve": self.reserve,
            "weights": self.weights,
            "activations": self.activations,
            "graphs": self.graphs,
            "tables": self.tables,
            "arena": self.arena,
            "unused": self.unused,
        }


def activation_bytes(limits: Limits, hidden_size: int, vocab_size: int, dtype: str) -> int:
    """The largest step's temporary tensors: an allowance, since no kernel has been asked.

    Args:
        limits: Tokens and requests of a step.
        hidden_size: Width of the model.
        vocab_size: Logits of one request, counted in the model's type and in float32.
        dtype: Element type of activations.
    """
    vectors = nbytes(dtype, VECTORS_A_TOKEN * limits.max_num_batched_tokens * hidden_size)
    logits = limits.max_num_seqs * vocab_size
    return vectors + nbytes(dtype, logits) + nbytes("float32", logits)


def table_bytes(config: KVCacheConfig, limits: Limits) -> int:
    """Block tables (int32, a row a request and group), slot mappings (int64) and the integers of a step's tokens.

    A row has a column for each kernel block that the longest request can hold in its largest step.
    """
    tokens, rows = limits.max_num_batched_tokens, limits.max_num_seqs
    scheduled = min(limits.max_model_len, tokens)
    total = 4 * (3 * (rows + 1) + 2 * tokens)  # query starts, lengths, computed; token ids and positions
    for group in config.kv_cache_groups:
        held = group.spec.retention.blocks_for_step(limits.max_model_len, scheduled, group.block_size)
        total += 4 * rows * (max(1, held) * group.ratio + 2) + 8 * tokens
    return total


def shown(terms: Sequence[DeviceTerms], name: str) -> list[str]:
    """One line a stage, for people; every number of it can be added up."""
    from kvcore.plan.explain import size  # late: it draws on the whole plan

    lines = []
    for stage, t in enumerate(terms):
        where = f"stage {stage} of {len(terms)}, " if len(terms) > 1 else ""
        end = f"{size(t.unused)} over" if t.left >= 0 else f"{size(-t.unused)} too little"
        lines.append(
            f"{where}each {name}: {size(t.total)} = {size(t.reserve)} kept free + {size(t.weights)} weights + "
            f"{size(t.activations)} activations + {size(t.graphs)} graphs and context + {size(t.tables)} tables + "
            f"{size(t.arena)} cache {'+' if t.left >= 0 else '-'} {end}"
        )
    return lines
