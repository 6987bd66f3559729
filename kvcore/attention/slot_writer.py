"""`SlotWriter`: the step's tokens into their slots, for backends without a write kernel of their own."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvcore.memory.kernels.cache_write import write_tokens
from kvcore.spec.layout import TOKEN, LayoutField, SizedLayout

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class SlotWriter:
    """Where the tokens of one step go, worked out once for all layers of a KV group.

    Args:
        slots_T: int64 [T] slot of each token; -1 writes nothing.
        layout: How the fields lie; no axis may be split.
    """

    def __init__(self, slots_T: torch.Tensor, layout: SizedLayout) -> None:
        size = layout.kernel_block_size
        written = (slots_T >= 0).nonzero().squeeze(1)
        self.rows = None if len(written) == len(slots_T) else written
        slots_T = slots_T if self.rows is None else slots_T[self.rows]
        self.blocks = slots_T.div(size, rounding_mode="floor")
        self.offsets = slots_T.remainder(size)
        self._order = {f.name: _token_first(f) for f in layout.layout.fields}

    def write(self, values: Mapping[str, torch.Tensor], cache: Mapping[str, torch.Tensor]) -> None:
        """Store every field of `values`.

        Args:
            values: Per field [T, *axes without the token], in the field's dtype or one that converts to it.
            cache: Per field the view [N, *axes in memory order].
        """
        for name, tokens_T in values.items():
            field = cache[name]
            tokens_T = tokens_T if self.rows is None else tokens_T[self.rows]
            if field.dtype in _FP8:
                # torch indexes bytes and not fp8: the codes are moved as they are.
                tokens_T, field = tokens_T.to(field.dtype).view(torch.uint8), field.view(torch.uint8)
            write_tokens(field.permute(self._order[name]), tokens_T, self.blocks, self.offsets)


def _token_first(field: LayoutField) -> tuple[int, ...]:
    """The permutation of a view [N, *axes] that puts the token axis after the blocks."""
    names = [axis.name for axis in field.axes]
    token = 1 + names.index(TOKEN)
    return (0, token, *(i for i in range(1, len(names) + 1) if i != token))
