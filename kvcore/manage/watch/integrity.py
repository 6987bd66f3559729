"""Proofs over rows and index, for `KVCacheManager.check_integrity`."""

from __future__ import annotations

import numpy as np

from kvcore.errors import IntegrityError
from kvcore.manage.prefix.prefix_cache import PrefixCache
from kvcore.manage.requests import Requests


def check_rows(requests: Requests, cache: PrefixCache) -> dict[int, int]:
    """Check every row against its request, and that no block serves two groups.

    Returns:
        How many rows hold each block.

    Raises:
        IntegrityError: With the first contradiction.
    """
    holders: dict[int, int] = {}
    owner: dict[int, int] = {}

    def owned(block: int, group: int) -> None:
        if owner.setdefault(block, group) != group:
            raise IntegrityError(
                "a block is owned by two groups", field="block", got=f"{block}: {owner[block]} and {group}"
            )

    for row in (r for r in requests.rows() if requests.admitted[r]):
        held = requests.held(np.array([row]))[0].tolist()
        idle = requests.limit[row] == requests.known[row]
        for rule in requests.rules:
            ids = requests.blocks.view(row * requests.groups + rule.index).tolist()
            first, last = int(requests.first[row, rule.index]), held[rule.index] + len(ids)
            end = -(-int(requests.computed[row]) // rule.block_size)
            emptied = rule.stores_nothing and not ids and idle
            if (last != end and not emptied) or not 0 <= held[rule.index] <= last or first > last:
                raise IntegrityError(
                    f"the row of request {requests.name(row)} does not end with its tokens",
                    field=f"group {rule.index}",
                    got=(held[rule.index], first, last),
                    allowed=end,
                )
            for block in ids:
                holders[block] = holders.get(block, 0) + 1
                owned(block, rule.index)
            if len(set(ids)) != len(ids):
                raise IntegrityError("a row holds a block twice", field="row", got=row)
    for group, digest, block in cache.entries():
        owned(block, group)
        if cache.get(group, digest) != block or block == 0:
            raise IntegrityError("the prefix index is broken", field="block", got=block)
    return holders
