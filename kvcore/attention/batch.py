"""`Batch`: one step as kernels see it. Tensors live in persistent buffers and are views of them.

Device tensors are for kernels; the arrays named `*_host` hold the same numbers for host code, so that
no backend needs a device synchronisation to learn a length. The batch is flat: sequence s owns tokens
``query_start_loc[s] .. query_start_loc[s + 1] - 1``; sequences with one token (decodes) come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

Int32Array = npt.NDArray[np.int32]


@dataclass(frozen=True)
class GroupBatch:
    """The part of a batch that depends on the KV group, in the group's *kernel* blocks.

    Attributes:
        kernel_block_size: Tokens of a kernel block P.
        block_table_SN: int32 [S, columns] kernel block ids; unused entries are 0 (the null block).
            Column 0 is kernel block `first_block[s]` of the sequence: rows of window and chunk
            groups hold the live tail only.
        counts: int32 [S] used columns of each row.
        first_block: int32 [S] index in the sequence of the kernel block in column 0.
        kv_lens: int32 [S] keys that the row's table holds: ``seq_len - first_block * P``.
        slot_mapping_T: int64 [T] slot of each token; -1 writes nothing.
        block_table_host, counts_host, first_block_host, kv_lens_host: the same on the host.
    """

    kernel_block_size: int
    block_table_SN: torch.Tensor
    counts: torch.Tensor
    first_block: torch.Tensor
    kv_lens: torch.Tensor
    slot_mapping_T: torch.Tensor
    block_table_host: Int32Array
    counts_host: Int32Array
    first_block_host: Int32Array
    kv_lens_host: Int32Array

    @property
    def max_kv_len(self) -> int:
        """Longest `kv_lens`, 0 for an empty batch."""
        return int(self.kv_lens_host.max(initial=0))


@dataclass(frozen=True)
class Batch:
    """One step.

    Attributes:
        query_start_loc: int32 [S + 1] prefix sums of the scheduled tokens, starting at 0.
        seq_lens: int32 [S] tokens of each sequence after this step.
        num_computed: int32 [S] tokens already in the cache before this step.
        query_start_loc_host, seq_lens_host, num_computed_host: the same on the host.
        groups: One `GroupBatch` for each KV group, by its index.
        num_tokens: T, tokens of the step without padding.
        num_decodes: Leading sequences with exactly one scheduled token and a cached prefix. Callers put
            decodes first; a one-token piece of a prefill may still come later.
        max_query_len: Most tokens that one sequence has in this step.
        max_seq_len: Longest sequence after this step.
        padded_tokens: Tokens with padding (equal to `num_tokens` without graph capture).
        capacity_seqs, capacity_tokens: What the persistent buffers can hold.
    """

    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    num_computed: torch.Tensor
    query_start_loc_host: Int32Array
    seq_lens_host: Int32Array
    num_computed_host: Int32Array
    groups: Sequence[GroupBatch]
    num_tokens: int
    num_decodes: int
    max_query_len: int
    max_seq_len: int
    padded_tokens: int
    capacity_seqs: int
    capacity_tokens: int

    @property
    def num_seqs(self) -> int:
        """S, sequences of the step."""
        return len(self.seq_lens_host)
