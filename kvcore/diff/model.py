"""A whole model through two backends: one engine, two arenas, every layer of every step compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import lcm

from kvcore.diff.divergence import Divergence
from kvcore.diff.shadow import add_shadow
from kvcore.engine.core import Announce
from kvcore.engine.llm import LLM
from kvcore.engine.planning import prepare_plan, select
from kvcore.engine.settings import EngineSettings, SamplingParams
from kvcore.errors import BackendUnsupportedError, ConfigError, IntegrityError
from kvcore.plan.config import KVCacheConfig
from kvcore.registry.registry import Registry
from kvcore.worker.executor.inline import InlineExecutor


def diff_model(
    settings: EngineSettings,
    names: tuple[str, str],
    registry: Registry,
    prompts: Sequence[str | tuple[int, ...]],
    sampling: SamplingParams,
    *,
    chat: bool = False,
    plain: EngineSettings | None = None,
    progress: Announce | None = None,
) -> Divergence:
    """Answer prompts with the first backend, and put every layer of every step through the second as well.

    Args:
        settings: The model, the cache and its size: each of the two arenas gets it in full.
        names: The two backends; each serves every layer.
        registry: Installed plugins.
        prompts: Texts, or sequences of token ids.
        sampling: How far to go; the tokens are the first backend's.
        chat: Wrap texts in the chat template.
        plain: Where `settings` store a plugin's content: the same without it, for a side that does not take it.
        progress: Called with a line of text before each long piece of work.

    Raises:
        BackendError: One of the two cannot serve a layer.
        ConfigError, CapacityError: They cannot work on blocks of one size, or on groups alike.
    """
    sides = [_side(settings, name, registry, plain) for name in names]
    if plain is not None and all(side.facts == plain.facts for side in sides):
        raise BackendUnsupportedError(
            "neither backend takes this content", field="cache.content", got=settings.cache.content, allowed="auto"
        )
    sides = _alike(sides, registry)
    llm = LLM(sides[0], registry, progress)
    executor = llm.core.executor
    if not isinstance(executor, InlineExecutor):
        raise ConfigError("diff runs inline", field="executor", got=type(executor).__name__, allowed="inline")
    plan, _ = prepare_plan(sides[1], registry, purpose="run")
    plan.require_fit()
    numbers = {f"p{i}": i for i in range(len(prompts))}
    divergence = add_shadow(executor.worker, plan.configs[0], lambda name: numbers[name.partition("#")[0]])
    for name, prompt in zip(numbers, prompts, strict=True):
        ids = llm.tokenizer.encode(prompt, chat=chat) if isinstance(prompt, str) else prompt
        llm.core.add_request(name, ids, sampling)
    if progress is not None:
        progress("comparing layer by layer")
    if plain is not None:
        first, second = ("+".join(sorted({c.spec.content.kind for c in s.facts.caches})) for s in sides)
        divergence.stored = (first, second)
    while llm.core.has_unfinished:
        llm.core.step()
    if not divergence.compared:
        raise IntegrityError("nothing was compared", field="compared", got=0, allowed=">= 1")
    return divergence


def _side(settings: EngineSettings, name: str, registry: Registry, plain: EngineSettings | None) -> EngineSettings:
    """The settings of one side: those of `plain` where its backend does not take the content."""
    asked = replace(settings, backend=replace(settings.backend, backend=name, by_kind={}))
    if plain is None:
        return asked
    try:
        select(asked, registry, purpose="run")
    except BackendUnsupportedError as refused:
        if refused.field != "content":
            raise
        return replace(asked, facts=plain.facts, cache=plain.cache)
    return asked


def _alike(sides: Sequence[EngineSettings], registry: Registry) -> list[EngineSettings]:
    """The same settings with a block size and a number of blocks that both can have."""
    first = [prepare_plan(side, registry, purpose="run")[0].configs[0] for side in sides]
    size = lcm(*(g.block_size for config in first for g in config.kv_cache_groups))
    sized = [replace(side, cache=replace(side.cache, block_size=size)) for side in sides]
    plans = [prepare_plan(side, registry, purpose="run")[0].configs[0] for side in sized]
    _check_groups(plans)
    blocks = min(config.num_blocks for config in plans)
    return [replace(side, cache=replace(side.cache, memory=None, num_blocks=blocks)) for side in sized]


def _check_groups(plans: Sequence[KVCacheConfig]) -> None:
    groups = [[(g.cache_ids, g.block_size) for g in config.kv_cache_groups] for config in plans]
    if groups[0] != groups[1]:
        raise ConfigError(
            "the two backends lead to unlike groups of layers",
            field="cache.block_size",
            got=[len(g) for g in groups],
            allowed="equal groups",
            remedy="compare them on a case of the kit: case=ID",
        )
