"""What an LRU cache of whole blocks gives, one request after the other: ids in ordered dictionaries alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

from kvcore.replay.arrival import Arrival

BLOCK = 512


def hit_blocks(arrivals: Iterable[Arrival], blocks: int) -> Iterator[int]:
    """Hit blocks of each request, when each one generates one token and ends before the next one comes.

    A hit covers whole blocks and never the last token. Blocks without content go first, then the content used
    longest ago; of one request the tail goes before the beginning.
    """
    cached: OrderedDict[tuple[int, ...], None] = OrderedDict()  # prefixes of ids, the next victim first
    empty = blocks
    for arrival in arrivals:
        ids = arrival.hash_ids or ()
        chains = [ids[: i + 1] for i in range(len(ids))]
        hits = 0
        while hits < (arrival.prompt_tokens - 1) // BLOCK and chains[hits] in cached:
            hits += 1
        yield hits
        for chain in chains[:hits]:
            cached.pop(chain)
        for _ in chains[hits:]:
            if empty:
                empty -= 1
            else:
                cached.popitem(last=False)
        full = arrival.prompt_tokens // BLOCK
        for chain in reversed(chains[:full]):
            if chain in cached:  # an equal block stays: ours has no content of its own
                empty += 1
            else:
                cached[chain] = None
        empty += len(chains) - full
