"""`kvcore.LLM`: the engine from the same overrides as the command line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from kvcore.config.build import build
from kvcore.config.compose import compose
from kvcore.engine import llm
from kvcore.engine.settings import SamplingParams
from kvcore.registry.loader import installed
from kvcore.registry.registry import Registry


class LLM(llm.LLM):
    """A model on the paged cache, built from Hydra overrides; works inside another Hydra application.

        llm = kvcore.LLM("model.path=/models/llama", "backend=torch", "cache.memory=2GiB")

    Args:
        overrides: As on the command line.
        registry: Plugins; None takes the installed ones.
        progress: Called with one line of text at each stage of start-up.

    Raises:
        KVCoreError: As the command line would print it.
    """

    def __init__(
        self, *overrides: str, registry: Registry | None = None, progress: Callable[[str], None] | None = None
    ) -> None:
        plugins = installed() if registry is None else registry
        composed = compose(overrides, plugins)
        built = build(composed, plugins, purpose="run")
        plugins.configure(composed.config.plugins)
        self.default_sampling = built.sampling
        self.default_chat = built.chat
        super().__init__(built.settings, plugins, progress)

    def generate(
        self,
        prompts: Sequence[str],
        sampling: SamplingParams | None = None,
        *,
        chat: bool | None = None,
        on_progress: llm.OnProgress | None = None,
    ) -> list[llm.Output]:
        """As `kvcore.engine.llm.LLM.generate`; what is not given is as the overrides say."""
        return super().generate(
            prompts,
            sampling or self.default_sampling,
            chat=self.default_chat if chat is None else chat,
            on_progress=on_progress,
        )

    def stream(
        self, prompts: Sequence[str], sampling: SamplingParams | None = None, *, chat: bool | None = None
    ) -> Iterator[llm.StreamEvent]:
        """As `kvcore.engine.llm.LLM.stream`; what is not given is as the overrides say."""
        return super().stream(
            prompts, sampling or self.default_sampling, chat=self.default_chat if chat is None else chat
        )
