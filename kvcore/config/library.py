"""`kvcore.LLM`: the engine from overrides, as on the command line, or from keywords."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from kvcore.config.build import build
from kvcore.config.compose import compose
from kvcore.config.schema import EngineRoot
from kvcore.config.sources import Files, overrides_of, said
from kvcore.engine import llm
from kvcore.engine.settings import CacheSettings, Limits, SamplingParams
from kvcore.registry.loader import installed
from kvcore.registry.registry import Registry


class LLM(llm.LLM):
    """A model on the paged cache; works inside another Hydra application.

        llm = kvcore.LLM("/models/llama", backend="torch", cache={"memory": "2GiB"})
        llm = kvcore.LLM("model.path=/models/llama", "backend=torch", "cache.memory=2GiB")

    Args:
        overrides: A folder or a model of the hub first, if one is named; then overrides as on the command line, which
            win over all else.
        backend, backend_by_kind, backends, plugins: Names and options, as in the keys so called.
        cache, engine, sampling: A dictionary of keys, or an instance of the class that checks them.
        model, device: Name of a preset, or a dictionary of keys.
        chat: Whether prompts go through the chat template; None is auto.
        config: A YAML file of keys, or None.
        config_dirs: Folders with presets.
        registry: Plugins; None takes the installed ones.
        progress: Called with one line of text at each stage of start-up.

    Raises:
        KVCoreError: As the command line would print it.
    """

    def __init__(
        self,
        *overrides: str,
        backend: str | None = None,
        backend_by_kind: Mapping[str, str] | None = None,
        backends: Mapping[str, Any] | None = None,
        plugins: Mapping[str, Any] | None = None,
        cache: CacheSettings | Mapping[str, Any] | None = None,
        engine: Limits | Mapping[str, Any] | None = None,
        sampling: SamplingParams | Mapping[str, Any] | None = None,
        model: str | Mapping[str, Any] | None = None,
        device: str | Mapping[str, Any] | None = None,
        chat: bool | None = None,
        config: str | None = None,
        config_dirs: Sequence[str] = (),
        registry: Registry | None = None,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        words = list(overrides)
        path = (
            [f"model.path={said(words.pop(0))}"] if words and isinstance(words[0], str) and "=" not in words[0] else []
        )
        named = {
            "backend": backend,
            "backend_by_kind": backend_by_kind,
            "backends": backends,
            "plugins": plugins,
            "cache": cache,
            "engine": engine,
            "sampling": sampling,
            "model": model,
            "device": device,
            "chat": chat,
        }
        spelled = overrides_of({name: value for name, value in named.items() if value is not None})
        known = installed() if registry is None else registry
        composed = compose([*path, *spelled, *words], known, EngineRoot, Files(config, tuple(config_dirs)))
        built = build(composed, known, purpose="run")
        known.configure(composed.config.plugins)
        self.default_sampling = composed.config.sampling
        self.default_chat = built.chat
        super().__init__(built.settings, known, progress)

    def generate(
        self,
        prompts: Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        chat: bool | None = None,
        salts: Sequence[str] | None = None,
        on_progress: llm.OnProgress | None = None,
    ) -> list[llm.Output]:
        """As `kvcore.engine.llm.LLM.generate`; what is not given is as the overrides say."""
        return super().generate(
            prompts,
            sampling or self.default_sampling,
            chat=self.default_chat if chat is None else chat,
            salts=salts,
            on_progress=on_progress,
        )

    def stream(
        self,
        prompts: Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        chat: bool | None = None,
        salts: Sequence[str] | None = None,
    ) -> Iterator[llm.StreamEvent]:
        """As `kvcore.engine.llm.LLM.stream`; what is not given is as the overrides say."""
        return super().stream(
            prompts, sampling or self.default_sampling, chat=self.default_chat if chat is None else chat, salts=salts
        )
