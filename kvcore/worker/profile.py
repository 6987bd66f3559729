"""How many bytes are left for the cache: a pure function of readings, and the readings on CUDA."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kvcore.errors import CapacityError


@dataclass(frozen=True)
class MemoryProfile:
    """What a rank uses besides its cache, in bytes.

    Attributes:
        weights: Parameters and buffers of the model.
        activations: Peak of temporary tensors in the largest step.
        non_torch: What other libraries and the context hold.
        graphs: Captured graphs, counted only when asked for.
    """

    weights: int
    activations: int = 0
    non_torch: int = 0
    graphs: int = 0

    @property
    def non_cache(self) -> int:
        """Bytes in use without any cache or graph."""
        return self.weights + self.activations + self.non_torch


@dataclass(frozen=True)
class MemorySnapshot:
    """Readings at one moment, in bytes.

    Attributes:
        allocated: Held by torch tensors.
        peak: Highest `allocated` since the last reset.
        reserved: Held by torch's allocator.
        used: Used on the whole device, by anyone.
    """

    allocated: int
    peak: int
    reserved: int
    used: int


def profile(before: MemorySnapshot, loaded: MemorySnapshot, after: MemorySnapshot, graphs: int = 0) -> MemoryProfile:
    """The profile from three snapshots: before loading, with weights, after the largest step.

    Only growth of this process counts: what a neighbour on the device frees meanwhile can make `used`
    shrink, and must neither raise nor be credited to us.
    """
    weights = loaded.allocated - before.allocated
    activations = max(0, after.peak - loaded.allocated)
    others_then = before.used - before.reserved
    others_now = after.used - after.reserved
    return MemoryProfile(weights, activations, max(0, others_now - others_then), graphs)


def cache_bytes(total: int, utilization: float, use: MemoryProfile, *, count_graphs: bool = False) -> int:
    """Bytes for the arena: ``total * utilization - non_cache``, less the graphs if they count.

    Raises:
        CapacityError: Nothing is left.
    """
    left = int(total * utilization) - use.non_cache - (use.graphs if count_graphs else 0)
    if left <= 0:
        raise CapacityError(
            "weights and activations leave no memory for a cache",
            field="cache.utilization",
            got=f"{utilization} of {total} bytes",
            allowed=f"more than {use.non_cache} bytes",
            remedy="raise cache.utilization, lower engine.max_num_batched_tokens, or use a larger device",
        )
    return left


def cuda_snapshot(device: torch.device) -> MemorySnapshot:
    """Readings of a CUDA device now."""
    free, total = torch.cuda.mem_get_info(device)
    return MemorySnapshot(
        torch.cuda.memory_allocated(device),
        torch.cuda.max_memory_allocated(device),
        torch.cuda.memory_reserved(device),
        total - free,
    )
