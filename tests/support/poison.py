"""Whole views of poison."""

from __future__ import annotations

import torch

from kvcore.memory.poison import poison_of


def fill_poison(tensor: torch.Tensor, dtype_name: str) -> None:
    """Fill a view with the poison of its dtype."""
    integer, code = poison_of(dtype_name)
    tensor.view(integer).fill_(code)
