"""Block tables as the library reads them: page ids of all sequences in a row, and where each begins."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kvcore.backend import GroupBatch


@dataclass(frozen=True)
class PageTable:
    """Compressed rows. Lengths are host tensors: `plan` reads them there, without asking the device.

    Attributes:
        indptr: int32 [n + 1] on the host: pages before each sequence.
        indices: int32 [pages] on the device.
        last_page_len: int32 [n] on the host: tokens in each last page, 1 to P; 0 without pages.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


def page_table(part: GroupBatch, first: int, last: int, device: torch.device) -> PageTable:
    """The pages of sequences `first` to `last` that hold keys; blocks kept for later tokens are left out."""
    size = part.kernel_block_size
    lengths = part.kv_lens_host[first:last]
    pages = -(-lengths // size)
    indptr = np.zeros(last - first + 1, np.int32)
    np.cumsum(pages, out=indptr[1:])
    table = part.block_table_host[first:last]
    # Row by row, the used columns from left to right: the order of the pages.
    used = np.arange(table.shape[1])[None, :] < pages[:, None]
    indices = np.ascontiguousarray(table[used], np.int32)
    ends = (lengths - np.maximum(pages - 1, 0) * size).astype(np.int32)
    return PageTable(torch.from_numpy(indptr), torch.from_numpy(indices).to(device), torch.from_numpy(ends))
