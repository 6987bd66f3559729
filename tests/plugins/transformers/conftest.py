from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.tiny_transformers import plain_model

ENGINE = {"max_model_len": 256, "max_num_seqs": 16}


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], torch.nn.Module]:
    """transformers' own tiny models, each loaded once."""
    home: Path = tmp_path_factory.getbasetemp()
    made: dict[str, torch.nn.Module] = {}

    def get(name: str) -> torch.nn.Module:
        if name not in made:
            made[name] = plain_model(name, home)
        return made[name]

    return get


@pytest.fixture
def cache_for() -> Callable[..., Any]:
    """A `PagedCache` of 400 blocks for a model."""
    from kvcore_transformers import PagedCache

    def make(model: torch.nn.Module, **more: Any) -> Any:
        options = {"backend": "torch", "cache": {"num_blocks": 400}, "engine": ENGINE} | more
        return PagedCache.for_model(model, **options)

    return make
