"""The proof that every large page, and every block of one, is in exactly one state and counted right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvcore.errors import IntegrityError

if TYPE_CHECKING:
    from kvcore.manage.large_pages.large_page_pool import LargePagePool


def check_pages(
    pool: LargePagePool, pending: set[int], cached: Sequence[bool], holders: Mapping[int, int] | None
) -> None:
    """Count everything again, page by page.

    Args:
        pool: The pool.
        pending: Numbers of blocks that wait for a step.
        cached: By number, whether its content can be hit.
        holders: Entries of all tables, by number; compared with the reference counts when given.

    Raises:
        IntegrityError: With the first contradiction.
    """
    free, evictable = list(pool.free), list(pool.evictable)
    if len({*free, *evictable}) != len(free) + len(evictable) or (len(free), len(evictable)) != (
        len(pool.free),
        len(pool.evictable),
    ):
        raise IntegrityError("a large page is in two queues, or miscounted", field="page", got=(free, evictable))
    refs, parked = pool.refs.tolist(), [0] * len(pool.cuts)
    queued = [(set(bare), set(victims)) for bare, victims in zip(pool.queues.bare, pool.queues.victims, strict=True)]
    left = sum(len(bare) + len(victims) for bare, victims in queued)
    for page in range(1, len(pool.owner)):
        group = int(pool.owner[page])
        if (group < 0) != (page in free):
            raise IntegrityError("a large page has no owner and is not free, or both", field="page", got=page)
        if group < 0:
            continue
        numbers = pool.blocks_of(group, np.array([page])).tolist()
        first = int(pool.first[group])
        bare, victims = ({n for n in numbers if n - first in ids} for ids in queued[group])
        used = {n for n in numbers if refs[n] or n in pending}
        rest = set(numbers) - used - victims
        right = (
            not used & victims
            and bare == (rest if used else set())
            and (page in evictable) == (not used)
            and (bool(used) or bool(victims))
            and victims == {n for n in numbers if cached[n]} - used
            and (len(used), len(victims)) == (pool.busy[page], pool.kept[page])
        )
        if not right:
            raise IntegrityError(
                "a large page is miscounted, or a block of it in two states",
                field="page",
                got=f"{page}: used {sorted(used)}, with content {sorted(victims)}, without {sorted(bare)}",
                allowed=f"{pool.busy[page]} used, {pool.kept[page]} with content",
            )
        left -= len(bare) + len(victims)
        parked[group] += 0 if used else len(victims)
    held = {n: count for n, count in enumerate(refs) if count}
    if left or parked != pool.parked.tolist() or len(held) + len(pending) != pool.busy.sum():
        raise IntegrityError("blocks are miscounted", field="parked", got=pool.parked.tolist(), allowed=parked)
    if holders is not None and held != {n: count for n, count in holders.items() if count}:
        wrong = next(n for n in held.keys() | holders.keys() if held.get(n, 0) != holders.get(n, 0))
        raise IntegrityError(
            "holders are miscounted", field="block", got=held.get(wrong, 0), allowed=holders.get(wrong)
        )
