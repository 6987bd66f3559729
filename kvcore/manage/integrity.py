"""Proofs over rows and index, for `KVCacheManager.check_integrity`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvcore.errors import IntegrityError
from kvcore.manage.group_rule import GroupRule
from kvcore.manage.prefix_cache import PrefixCache
from kvcore.manage.request import RequestState


def check_rows(requests: Iterable[RequestState], rules: Sequence[GroupRule], cache: PrefixCache) -> dict[int, int]:
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

    for request in requests:
        for rule, row in zip(rules, request.rows, strict=False):
            end = -(-request.computed // rule.block_size)
            emptied = rule.stores_nothing and not row.ids and request.in_flight == 0
            if (row.end != end and not emptied) or not row.held <= row.first <= row.end:
                raise IntegrityError(
                    f"the row of request {request.request_id} does not end with its tokens",
                    field=f"group {rule.index}",
                    got=(row.held, row.first, row.end),
                    allowed=end,
                )
            for block in row.ids:
                holders[block] = holders.get(block, 0) + 1
                owned(block, rule.index)
            if len(set(row.ids)) != len(row.ids):
                raise IntegrityError("a row holds a block twice", field="request_id", got=request.request_id)
    for group, digest, block in cache.entries():
        owned(block, group)
        if cache.get(group, digest) != block or block == 0:
            raise IntegrityError("the prefix index is broken", field="block", got=block)
    return holders
