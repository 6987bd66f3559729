"""`check_disjoint`: no two views of one group share a byte."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import torch

from kvcore.errors import IntegrityError
from kvcore.plan.config import KVCacheConfig
from kvcore.spec.cache_spec import CacheId

_LOOKED_AT = 2  # neighbouring blocks: strides repeat


def check_disjoint(config: KVCacheConfig, views: Mapping[CacheId, Mapping[str, torch.Tensor]]) -> None:
    """Compare the bytes of the first blocks of all views of each group, each with each.

    Caches of unlike groups may share memory (a block id is one group's at a time), and a cache that reads another's
    has its views; both are right.

    Args:
        config: The plan.
        views: By cache, the field tensors [kernel blocks, ...].

    Raises:
        IntegrityError: Two views overlap; names both.
    """
    for group in config.kv_cache_groups:
        found = [
            (f"{cache}.{name}, block {block}", *_runs(tensor[block]))
            for cache in group.cache_ids
            for name, tensor in views[cache].items()
            for block in range(min(_LOOKED_AT, len(tensor)))
        ]
        starts = np.concatenate([runs for _, runs, _ in found])
        ends = np.concatenate([runs + length for _, runs, length in found])
        owners = np.repeat(np.arange(len(found)), [len(runs) for _, runs, _ in found])
        order = np.argsort(starts, kind="stable")
        overlap = (ends[order][:-1] > starts[order][1:]).nonzero()[0]
        if len(overlap):
            one, other = (found[owners[order[overlap[0] + i]]][0] for i in (0, 1))
            raise IntegrityError(
                f"two views share memory: {one}, and {other}",
                field="cache.sanitize",
                got=f"group {group.index}: byte {int(starts[order[overlap[0] + 1]] - starts.min())} of its views",
                remedy="repair the layout or the view: what one layer writes, another one reads",
            )


def _runs(tensor: torch.Tensor) -> tuple[npt.NDArray[np.int64], int]:
    """Addresses of the contiguous runs of bytes of a tensor, and the length of each."""
    width, length = tensor.element_size(), tensor.element_size()
    starts = np.array([tensor.data_ptr()], np.int64)
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if stride * width == length and len(starts) == 1:
            length *= size
        elif size > 1:
            starts = (starts[:, None] + np.arange(size) * stride * width).ravel()
    return starts, length
