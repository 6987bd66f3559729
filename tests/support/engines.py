"""Engines for tests: any model directory, any limits, without the command line."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from kvcore.attention.declaration import DeviceFacts
from kvcore.engine.llm import LLM
from kvcore.engine.settings import BackendChoice, CacheSettings, EngineSettings, Limits
from kvcore.models.config_json import read_config
from kvcore.models.families import model_facts
from kvcore.registry.loader import installed

LIMITS = [f.name for f in fields(Limits)]


def engine_settings(
    path: Path,
    *,
    dtype: str = "float32",
    mla: str = "auto",
    options: dict[str, Any] | None = None,
    backend: str = "torch",
    by_kind: dict[str, str] | None = None,
    **keys: Any,
) -> EngineSettings:
    """Settings for a model directory; `keys` are limits, or fields of `CacheSettings`."""
    facts = model_facts(read_config(path), dtype=dtype, cache=CacheSettings(mla=mla))
    limits = {k: keys.pop(k) for k in LIMITS if k in keys}
    limits.setdefault("max_model_len", min(facts.max_model_len, 1024))
    registry = installed()
    chosen = {n: spec.Config(**(options or {}).get(n, {})) for n, spec in registry.backends.items()}
    if "num_blocks" not in keys:
        keys.setdefault("memory", 64 << 20)
    return EngineSettings(
        facts=facts,
        model_path=str(path),
        device=DeviceFacts("cpu", "test"),
        cache=CacheSettings(**keys),
        backend=BackendChoice(backend, by_kind or {}, chosen),
        engine=Limits(**limits),
    )


def make_llm(path: Path, **keys: Any) -> LLM:
    """An `LLM` on the CPU; see `engine_settings`."""
    return LLM(engine_settings(path, **keys), installed())
