"""`SlotWriter`: the step's tokens into their slots, for backends without a write kernel of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.memory.kernels.cache_write import write_slots
from kvcore.spec.layout import TOKEN, LayoutField, SizedLayout


class SlotWriter:
    """Writes fields in the order of any layout whose axes are not split, through the core's plain write.

    Args:
        slots_T: int64 [T] slot of each token; -1 writes nothing.
        layout: How the fields lie.
    """

    def __init__(self, slots_T: torch.Tensor, layout: SizedLayout) -> None:
        self.slots_T = slots_T
        self._order = {f.name: _token_first(f) for f in layout.layout.fields}

    def write(self, values: Mapping[str, torch.Tensor], cache: Mapping[str, torch.Tensor]) -> None:
        """Store every field of `values`.

        Args:
            values: Per field at least [T, *axes without the token], in the field's dtype or one that converts to it;
                rows beyond the slots are padding.
            cache: Per field the view [N, *axes in memory order].
        """
        for name, tokens_T in values.items():
            write_slots(cache[name].permute(self._order[name]), tokens_T[: len(self.slots_T)], self.slots_T)


def _token_first(field: LayoutField) -> tuple[int, ...]:
    """The permutation of a view [N, *axes] that puts the token axis after the blocks."""
    names = field.axis_names
    token = 1 + names.index(TOKEN)
    return (0, token, *(i for i in range(1, len(names) + 1) if i != token))
