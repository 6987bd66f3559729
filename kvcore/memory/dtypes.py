"""From the logical half's dtype names to torch dtypes."""

from __future__ import annotations

import torch

from kvcore.spec.dtypes import dtype


def torch_dtype(name: str) -> torch.dtype:
    """The storage type of dtype `name`; packed types are stored as bytes.

    Raises:
        SpecError: The name is unknown.
    """
    found: torch.dtype = getattr(torch, dtype(name).torch_name)
    return found
