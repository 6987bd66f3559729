"""What the two-dimensional attention mask of a padded batch says: which of its columns hold a token of which sequence.

Sequences are padded on the left. A column that was seen stays what it was, so a mask of later calls can only repeat
what an earlier one said.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kvcore.backend import ConfigError

Bools = npt.NDArray[np.bool_]


def columns_of(mask: Any, size: int, seen: Bools, width: int) -> Bools:
    """The columns of a forward pass, [size, seen + width]: True where a token is.

    Args:
        mask: As the caller gave it: [size, seen + width] of zeros and ones, or None for ones.
        size: Sequences of the batch.
        seen: [size, seen], what earlier passes saw.
        width: Columns of this pass.

    Raises:
        ConfigError: Another kind of mask, padding that does not lie left of all tokens, or another past.
    """
    whole = seen.shape[1] + width
    if mask is None:
        found = np.ones((size, whole), np.bool_)
    elif not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (size, whole):
        shape = tuple(mask.shape) if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise ConfigError(
            "masks follow from the model's config and from padding alone",
            field="attention_mask",
            got=shape,
            allowed=f"[{size}, {whole}]: the sequences, and every column from the first",
        )
    else:
        found = mask.bool().cpu().numpy()
    if not np.array_equal(found[:, : seen.shape[1]], seen):
        raise ConfigError(
            "the mask says something else of columns that are in the cache already",
            field="attention_mask",
            got="another past",
            allowed="what was given before",
            remedy="call reset() on the cache before an unrelated batch",
        )
    if (found[:, 1:] < found[:, :-1]).any():
        raise ConfigError(
            "a column behind a token is masked",
            field="attention_mask",
            got="padding on the right, or between tokens",
            allowed="padding on the left",
            remedy="tokenizer.padding_side = 'left'",
        )
    return found
