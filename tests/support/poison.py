"""Whole views of poison."""

from __future__ import annotations

import torch

from kvcore.memory.poison import CODES


def fill_poison(tensor: torch.Tensor, dtype_name: str) -> None:
    """Fill a view with the poison of its dtype."""
    integer, code = CODES[dtype_name]
    tensor.view(integer).fill_(code)
