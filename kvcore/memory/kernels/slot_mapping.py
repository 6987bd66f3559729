"""Slot mapping on the device, from tables and positions that are there already (torch twin)."""

from __future__ import annotations

import torch


def slot_mapping(
    table_SN: torch.Tensor,
    first_block_S: torch.Tensor,
    rows_T: torch.Tensor,
    positions_T: torch.Tensor,
    block_size: int,
    out_T: torch.Tensor,
    *,
    world: int = 1,
    rank: int = 0,
) -> None:
    """The slot of every token: ``block * block_size + offset``; -1 where another rank owns the token.

    Token i lies on rank ``i % world`` at local position ``i // world``.

    Args:
        table_SN: int32 [S, columns] block ids; column 0 is block `first_block_S` of the sequence.
        first_block_S: int32 [S].
        rows_T: int [T] row of each token.
        positions_T: int [T] position of each token in its sequence.
        block_size: Tokens of the table's blocks.
        out_T: int64 [T], written.
        world: Ranks that the context is interleaved over.
        rank: This rank.
    """
    local_T = positions_T if world == 1 else positions_T.div(world, rounding_mode="floor")
    columns_T = local_T.div(block_size, rounding_mode="floor") - first_block_S[rows_T]
    if world > 1:
        # Another rank's last token can lie one block further than this rank's table reaches.
        columns_T = columns_T.clamp_(max=table_SN.shape[1] - 1)
    torch.add(
        table_SN[rows_T, columns_T].to(torch.int64) * block_size, local_T.remainder(block_size), out=out_T
    )
    if world > 1:
        out_T.masked_fill_(positions_T.remainder(world) != rank, -1)
