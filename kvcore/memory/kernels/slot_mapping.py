"""Slot mapping on the device, from tables that are there already: Triton on a GPU, a torch twin elsewhere."""

from __future__ import annotations

import torch

from kvcore.memory.kernels.launch import launcher_for

BLOCK = 256


def slot_mapping(
    table_SN: torch.Tensor,
    first_block_S: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_S: torch.Tensor,
    block_size: int,
    out_T: torch.Tensor,
    *,
    world: int = 1,
    rank: int = 0,
    interpret: bool = False,
) -> None:
    """The slot of every token: ``block * block_size + offset``; -1 where another rank owns the token.

    Token i of a sequence lies on rank ``i % world`` at local position ``i // world``.

    Args:
        table_SN: int32 [S, columns] block ids; column 0 is block `first_block_S` of the sequence.
        first_block_S: int32 [S].
        query_start_loc: int32 [S + 1] prefix sums of the step's tokens.
        num_computed_S: int32 [S] position of each sequence's first token in this step.
        block_size: Tokens of the table's blocks.
        out_T: int64 [at least the step's tokens], written whole: entries after the last token become -1 (padding).
        world: Ranks that the context is interleaved over.
        rank: This rank.
        interpret: Run the Triton kernel in its interpreter.
    """
    launcher = launcher_for(table_SN.device, interpret)
    if launcher is None:
        _in_torch(table_SN, first_block_S, query_start_loc, num_computed_S, block_size, out_T, world, rank)
        return
    from kvcore.memory.kernels.triton_kernels import slots_of_sequences

    seqs = len(query_start_loc) - 1
    args = {
        "table_ptr": table_SN,
        "table_stride": table_SN.stride(0),
        "first_block_ptr": first_block_S,
        "starts_ptr": query_start_loc,
        "computed_ptr": num_computed_S,
        "out_ptr": out_T,
        "seqs": seqs,
        "total": len(out_T),
        "block_size": block_size,
        "columns": table_SN.shape[1],
        "world": world,
        "rank": rank,
        "BLOCK": BLOCK,
    }
    launcher(slots_of_sequences, (seqs + 1,), args, num_warps=4)


def _in_torch(
    table_SN: torch.Tensor,
    first_block_S: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_S: torch.Tensor,
    block_size: int,
    out_T: torch.Tensor,
    world: int,
    rank: int,
) -> None:
    counts_S = query_start_loc.diff()
    rows_T = torch.repeat_interleave(counts_S)
    positions_T = torch.arange(len(rows_T)) + (num_computed_S - query_start_loc[:-1])[rows_T]
    out_T[len(rows_T) :] = -1
    out_T = out_T[: len(rows_T)]
    local_T = positions_T if world == 1 else positions_T.div(world, rounding_mode="floor")
    columns_T = local_T.div(block_size, rounding_mode="floor") - first_block_S[rows_T]
    if world > 1:
        # Another rank's last token can lie one block further than this rank's table reaches.
        columns_T = columns_T.clamp_(max=table_SN.shape[1] - 1)
    torch.add(table_SN[rows_T, columns_T].to(torch.int64) * block_size, local_T.remainder(block_size), out=out_T)
    if world > 1:
        out_T.masked_fill_(positions_T.remainder(world) != rank, -1)
