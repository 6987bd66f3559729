"""What an engine is built from, as plain data: no Hydra, no torch."""

from __future__ import annotations

from kvcore.engine.sampling import SamplingParams
from kvcore.plan.capacity import Limits
from kvcore.registry.choice import BackendChoice
from kvcore.settings.cache import CacheSettings
from kvcore.worker.settings import EngineSettings

__all__ = ["BackendChoice", "CacheSettings", "EngineSettings", "Limits", "SamplingParams"]
