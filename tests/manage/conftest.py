from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from support.named_manager import NamedManager

from kvcore.plan.config import KVCacheConfig, KVCacheGroupSpec
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.layout import SizedLayout, plain_layout
from kvcore.spec.retention import Full, Retention

Make = Callable[..., KVCacheConfig]


def make_config(
    groups: Sequence[tuple[Retention, int]], num_blocks: int, cuts: Sequence[int] | None = None
) -> KVCacheConfig:
    """Under `slots`, or with `cuts` under `packed`; `num_blocks` are large pages then."""
    content, per_page = KVHeads(1, 8), cuts or [1] * len(groups)
    return KVCacheConfig(
        "packed" if cuts else "slots",
        0 if cuts else num_blocks,
        tuple(
            KVCacheGroupSpec(
                index=i,
                spec=KVCacheSpec(content, retention),
                backend=None,
                cache_ids=(CacheId(i),),
                layout=SizedLayout(plain_layout(content), block_size),
                block_size=block_size,
                block_stride=1,
                num_blocks=num_blocks * per_page[i],
                blocks_per_large_page=per_page[i] if cuts else 0,
            )
            for i, (retention, block_size) in enumerate(groups)
        ),
        (),
        num_large_pages=num_blocks if cuts else 0,
        large_page_bytes=1 if cuts else 0,
    )


@pytest.fixture(scope="session")
def config_of() -> Make:
    """(retention, block size) of every group, and the number of ids -> a config under `slots`."""
    return make_config


@pytest.fixture(scope="session")
def packed_config_of() -> Make:
    """The same under `packed`, cut into numbers of blocks that are no multiples of each other."""

    def make(groups: Sequence[tuple[Retention, int]], num_pages: int) -> KVCacheConfig:
        return make_config(groups, num_pages, [(1, 3, 2, 5)[(i + num_pages) % 4] for i in range(len(groups))])

    return make


@pytest.fixture
def manager_of(config_of):
    def make(*groups, blocks=100, **options) -> NamedManager:
        return NamedManager(config_of(groups or [(Full(), 16)], blocks), **options)

    return make
