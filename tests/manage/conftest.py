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


def make_config(groups: Sequence[tuple[Retention, int]], num_blocks: int) -> KVCacheConfig:
    content = KVHeads(1, 8)
    return KVCacheConfig(
        "slots",
        num_blocks,
        tuple(
            KVCacheGroupSpec(
                index=i,
                spec=KVCacheSpec(content, retention),
                backend=None,
                cache_ids=(CacheId(i),),
                layout=SizedLayout(plain_layout(content), block_size),
                block_size=block_size,
                block_stride=1,
                num_blocks=num_blocks,
            )
            for i, (retention, block_size) in enumerate(groups)
        ),
        (),
    )


@pytest.fixture(scope="session")
def config_of() -> Make:
    """(retention, block size) of every group, and the number of ids -> a config under `slots`."""
    return make_config


@pytest.fixture
def manager_of(config_of):
    def make(*groups, blocks=100, **options) -> NamedManager:
        return NamedManager(config_of(groups or [(Full(), 16)], blocks), **options)

    return make
