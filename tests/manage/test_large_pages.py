import random

import numpy as np
import pytest
from support.slow_pool import SlowPool

from kvcore.errors import OutOfBlocksError
from kvcore.manage.large_pages.large_page_pool import LargePagePool

CUTS = [[1], [3], [1, 1], [3, 2], [5, 1], [26, 5, 2], [1, 4, 7]]


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("seed", range(12))
def test_the_pool_is_the_slow_pool(cuts, seed):
    rng = random.Random(seed)
    pages = rng.choice([2, 4, 9, 20])
    evicted, dead = [], []
    pool = LargePagePool(
        cuts, pages, on_evict=lambda b: evicted.extend(b.tolist()), on_death=lambda b: dead.extend(b.tolist())
    )
    slow = SlowPool(cuts, pages)
    held, step = [], 1  # every holding by itself
    for _ in range(400):
        act = rng.random()
        if act < 0.4:
            groups = [rng.randrange(len(cuts)) for _ in range(rng.choice([1, 1, 2, 3, 8]))]
            needs = [groups.count(g) for g in range(len(cuts))]
            idle = [b for g in range(len(cuts)) for b in slow.idle(g)]
            revived = rng.sample(idle, min(len(idle), rng.randrange(4)))
            numbers = np.array([slow.number(b) for b in revived], np.int64)
            assert pool.missing(needs, numbers.tolist()) == slow.missing(needs, revived)
            if slow.missing(needs):
                with pytest.raises(OutOfBlocksError):
                    pool.take(np.array(groups))
                continue
            mine = [slow.number(b) for b in slow.take(groups)]
            assert pool.take(np.array(groups)).tolist() == mine
            held += [slow.block(n) for n in mine]
        elif act < 0.6 and held:
            rng.shuffle(held)
            n = rng.randrange(1, 1 + min(len(held), 12))
            gone, held = held[:n], held[n:]
            reader = rng.choice([0, step, step + 1])
            slow.release(gone, reader)
            pool.release(np.array([slow.number(b) for b in gone]), reader)
        elif act < 0.75:
            step += rng.randrange(2)
            slow.retire(step)
            pool.retire(step)
        elif act < 0.9 and held:
            some = list({b for b in rng.sample(held, min(len(held), 5)) if b not in slow.content})
            slow.content |= set(some)
            pool.set_cached(np.array([slow.number(b) for b in some], np.int64))
        elif act < 0.97:
            alive = [*slow.content, *slow.holders]
            some = sorted(set(rng.sample(sorted(alive), min(len(alive), 4))))
            slow.share(some)
            pool.share(np.array([slow.number(b) for b in some], np.int64))
            held += some
        elif slow.content:
            some = rng.sample(sorted(slow.content), min(len(slow.content), 3))
            slow.uncache(some)
            pool.uncache(np.array([slow.number(b) for b in some]))
        assert evicted == [slow.number(b) for b in slow.lost]
        pool.check_integrity({slow.number(b): n for b, n in slow.holders.items()})
        assert pool.num_free == len(slow.pages())
