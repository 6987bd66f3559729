"""What an engine is built from, as plain data: no Hydra, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.attention.spec import DeviceFacts
from kvcore.engine.sampling import SamplingParams
from kvcore.models.facts import CacheChoice, ModelFacts
from kvcore.registry.choice import BackendChoice

__all__ = ["BackendChoice", "CacheSettings", "EngineSettings", "SamplingParams"]


@dataclass(frozen=True)
class CacheSettings:
    """The cache as asked for.

    Attributes:
        block_size: Tokens of a block; None is auto.
        placement: auto, slots or packed.
        memory_bytes, num_blocks: Size of the arena; at most one; neither leaves it to the device.
        utilization: Share of the device's total memory that the engine may use in all.
        prefix_caching: Whether prefixes are reused.
        salt: Isolates the prefixes of tenants.
        hash: sha256 or xxh3.
        eviction: Name of the eviction policy.
        sanitize: Poison content when it dies.
        choice: dtypes and scales.
    """

    block_size: int | None = None
    placement: str = "auto"
    memory_bytes: int | None = None
    num_blocks: int | None = None
    utilization: float = 0.9
    prefix_caching: bool = True
    salt: str = ""
    hash: str = "sha256"
    eviction: str = "lru"
    sanitize: bool = False
    choice: CacheChoice = field(default_factory=CacheChoice)


@dataclass(frozen=True)
class EngineSettings:
    """Everything that `EngineCore` needs.

    Attributes:
        facts: The model's facts.
        model_path: Directory with weights and tokenizer; None for planning alone.
        device: Facts of the device; its `kind` names the torch device.
        cache, backend: As above.
        max_model_len: Longest sequence; never above the model's own limit in `run`.
        max_num_seqs, max_num_batched_tokens: Limits of one step.
    """

    facts: ModelFacts
    model_path: str | None
    device: DeviceFacts
    cache: CacheSettings = field(default_factory=CacheSettings)
    backend: BackendChoice = field(default_factory=BackendChoice)
    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
