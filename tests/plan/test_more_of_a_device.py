"""More memory, more ranks or a shorter limit never hold less: real models on a device, weights and tables charged."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise

import pytest
from real_configs import REAL, model_name, settings_of

from kvcore.engine.planning import prepare_plan
from kvcore.engine.settings import EngineSettings
from kvcore.errors import ConfigError, ModelError
from kvcore.plan.ranks import Ranks
from kvcore.registry.loader import installed

# A latent, a hybrid with experts, unlike heads, plain layers; the others in the long run.
FEW = ("DeepSeek-V3.2", "Qwen3.5-35B-A3B", "gemma-4-26B-A4B", "Meta-Llama-3.1-70B")
CASES = [
    pytest.param(file, marks=() if model_name(file).endswith(FEW) else pytest.mark.long, id=model_name(file))
    for file in REAL
]
LONGEST = 32_768


def held(settings: EngineSettings) -> tuple[int, int]:
    """The longest sequence that fits, and sequences of the limit at once."""
    capacity = prepare_plan(settings, installed(), purpose="plan")[0].capacity
    return capacity.longest(), capacity.simultaneous(settings.engine.max_model_len)


def grows(found: Iterable[tuple[int, ...]]) -> bool:
    return all(a <= b for less, more in pairwise(found) for a, b in zip(less, more, strict=True))


@pytest.fixture
def settings(request: pytest.FixtureRequest) -> EngineSettings:
    made = settings_of(request.param, "device=h200-141gb", f"engine.max_model_len={LONGEST}")
    if isinstance(made.weights, ModelError):
        pytest.skip(str(made.weights))
    return made


@pytest.mark.parametrize("settings", CASES, indirect=True)
def test_more_memory(settings: EngineSettings) -> None:
    device, found = settings.device, []
    for gib in (60, 141, 142, 300, 2000):
        found.append(held(replace(settings, device=replace(device, memory_bytes=gib << 30))))
    assert grows(found), found


@pytest.mark.parametrize("settings", CASES, indirect=True)
def test_more_ranks(settings: EngineSettings) -> None:
    """Where each number divides the next one; and stages beside them."""
    found: dict[int, tuple[int, int]] = {}
    for tensor in (1, 2, 4, 8):
        with suppress(ConfigError):  # not allowed for this model's heads
            found[tensor] = held(replace(settings, ranks=Ranks(tensor)))
    assert grows(found.values()), found
    alone = held(settings)
    assert grows([alone, held(replace(settings, ranks=Ranks(1, 2)))])


@pytest.mark.parametrize("settings", CASES, indirect=True)
def test_a_longer_limit(settings: EngineSettings) -> None:
    roomy = replace(settings, device=replace(settings.device, memory_bytes=2000 << 30))
    found = []
    for longest in (LONGEST + 1, LONGEST, LONGEST - 1, 8192, 1024, 512):
        found.append(held(replace(roomy, engine=replace(roomy.engine, max_model_len=longest)))[1:])
    assert grows(found), found
