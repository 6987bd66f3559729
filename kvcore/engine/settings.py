"""What an engine is built from, as plain data: no Hydra, no torch."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.attention.spec import DeviceFacts
from kvcore.errors import RequestError
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


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    Attributes:
        max_tokens: Most tokens to generate.
        temperature: 0 is greedy.
        top_p, top_k: Nucleus and top-k filters; 1.0 and 0 switch them off.
        seed: Sample i of a request draws from the generator seeded with ``seed + i``.
        n: Samples of one prompt.
        stop: Texts that end the output; they are cut off.
        ignore_eos: Go on after an EOS id.
    """

    max_tokens: int = 64
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        """Types; whether the values can be served, the engine says.

        Raises:
            RequestError: A value has another type.
        """
        for name, kinds, allowed in _SAMPLING_TYPES:
            value = getattr(self, name)
            # True is a number to Python, and to nobody who samples.
            if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
                raise RequestError(
                    f"sampling.{name} is {type(value).__name__}", field=f"sampling.{name}", got=value, allowed=allowed
                )


_SAMPLING_TYPES: tuple[tuple[str, tuple[type, ...], str], ...] = (
    ("max_tokens", (int,), "a whole number"),
    ("temperature", (int, float), "a number"),
    ("top_p", (int, float), "a number"),
    ("top_k", (int,), "a whole number"),
    ("seed", (int,), "a whole number"),
    ("n", (int,), "a whole number"),
    ("ignore_eos", (bool,), "true or false"),
)
