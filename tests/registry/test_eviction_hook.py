"""A plugin's eviction policy decides which cached block goes first, in a running engine."""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from kvcore.engine.settings import SamplingParams
from kvcore.errors import ConfigError
from kvcore.manage.policies.eviction import EvictionPolicy
from kvcore.registry.hookspecs import hookimpl
from kvcore.registry.loader import load
from kvcore.registry.records import PluginSource, installed_sources
from kvcore.registry.registry import Registry


class Newest(EvictionPolicy):
    """What becomes free first stays longest: the opposite of the core's own."""

    name = "newest"

    def __init__(self) -> None:
        self.calls = 0

    def level(self, hits: Any, reach: Any) -> Any:
        self.calls += 1
        return hits * 0 + max(0, self.levels - self.calls)


@pytest.fixture(scope="module")
def registry() -> Registry:
    module = ModuleType("newest_plugin")
    module.kvcore_eviction_policies = hookimpl(lambda: (Newest,))  # type: ignore[attr-defined]
    return load([*installed_sources(), PluginSource("newest", "newest", "1.0", lambda: module)])


def first_prompt_hits(eviction: str, registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> int:
    """Tokens of a first prompt that are still cached after others have filled the cache."""
    # Here, since a module whose classes a plugin declares must not import torch.
    from models.tiny import tiny_model
    from support.engines import engine_settings

    from kvcore.engine.llm import LLM

    path = tiny_model("llama", tmp_path_factory.getbasetemp())
    settings = engine_settings(path, max_model_len=96, num_blocks=12, max_num_seqs=1)
    settings = replace(settings, cache=replace(settings.cache, eviction=eviction))
    llm = LLM(settings, registry)

    def serve(prompt: list[int]) -> int:
        request = llm.core.add_request("r", prompt, SamplingParams(max_tokens=1, ignore_eos=True))
        while llm.core.has_unfinished:
            llm.core.step()
        return request.num_cached_tokens or 0

    for prompt in ([5] * 65, [6] * 65, [7] * 65, [8] * 65):
        serve(prompt)
    llm.core.manager.check_integrity()
    assert llm.core.manager.stats()["evictions"] > 0
    return serve([5] * 65)


def test_it_decides(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert first_prompt_hits("lru", registry, tmp_path_factory) == 0
    assert first_prompt_hits("newest", registry, tmp_path_factory) == 64


def test_an_unknown_policy_is_a_typed_error(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> None:
    with pytest.raises(ConfigError) as caught:
        first_prompt_hits("oldest", registry, tmp_path_factory)
    assert caught.value.field == "cache.eviction"
    assert list(caught.value.allowed) == ["cost", "lfu", "lru", "newest"]
