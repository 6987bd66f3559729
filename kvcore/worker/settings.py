"""`EngineSettings`: what the engine and each of its workers are built from, as plain data: no Hydra, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.attention.declaration import DeviceFacts
from kvcore.errors import ModelError
from kvcore.models.facts import ModelFacts
from kvcore.models.parameters.shares import StoredWeights
from kvcore.plan.capacity import Limits
from kvcore.plan.ranks import Ranks
from kvcore.registry.choice import BackendChoice
from kvcore.settings.cache import CacheSettings


@dataclass(frozen=True)
class EngineSettings:
    """Everything that `EngineCore` and `Worker` need; `cache` and `engine` are the user's own nodes.

    Attributes:
        facts: The model's facts.
        model_path: Directory with weights and tokenizer; None for planning alone.
        device: Facts of the device; its `kind` names the torch device.
        cache: The keys `cache.*`.
        backend: Who serves which caches.
        engine: The keys `engine.*`; in `run`, `max_model_len` is never above the model's own limit.
        ranks: The keys `parallel.*`.
        weights: The weights where something tells their bytes, else the error that says what is missing.
    """

    facts: ModelFacts
    model_path: str | None
    device: DeviceFacts
    cache: CacheSettings = field(default_factory=CacheSettings)
    backend: BackendChoice = field(default_factory=BackendChoice)
    engine: Limits = field(default_factory=Limits)
    ranks: Ranks = field(default_factory=Ranks)
    weights: StoredWeights | ModelError | None = None
