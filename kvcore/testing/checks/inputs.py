"""`Kept`: proof that a backend leaves what it is given as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from kvcore.attention.backend import AttentionLayer
from kvcore.attention.batch import Batch
from kvcore.testing.cases.outcome import CheckFailure

Held = torch.Tensor | np.typing.NDArray[Any]


class Kept:
    """A picture of tensors and host arrays, compared after a call.

    Args:
        held: What is held, by the name that a failure gives it.
    """

    def __init__(self, held: Mapping[str, Held]) -> None:
        self._held = dict(held)
        self._before = {name: _bits(value).copy() for name, value in self._held.items()}

    def unchanged(self, call: str) -> None:
        """Raise `CheckFailure` when something is not what it was before `call`."""
        for name, value in self._held.items():
            if not np.array_equal(_bits(value), self._before[name]):
                raise CheckFailure(f"{call} changed {name}")


def keep_step(batch: Batch, layers: Sequence[AttentionLayer]) -> Kept:
    """The tensors of a step: its batch on device and host, and what is each layer's own."""
    held = _tensors(batch, "the batch's")
    for i, group in enumerate(batch.groups):
        held |= _tensors(group, f"the batch's group {i},")
    for layer in layers:
        held |= _tensors(layer, f"layer {layer.cache_id}'s")
    return Kept(held)


def keep_given(tensors: Mapping[str, torch.Tensor]) -> Kept:
    """The tensors that one call is given."""
    return Kept({f"the {name} that it was given": t for name, t in tensors.items()})


def _tensors(owner: Any, words: str) -> dict[str, Held]:
    named = {f"{words} {f.name}": getattr(owner, f.name) for f in fields(owner)}
    return {name: value for name, value in named.items() if isinstance(value, torch.Tensor | np.ndarray)}


def _bits(value: Held) -> np.typing.NDArray[np.uint8]:
    """The bytes: NaN is equal to itself, and a dtype that numpy lacks is no obstacle."""
    if isinstance(value, np.ndarray):
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    return np.asarray(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
