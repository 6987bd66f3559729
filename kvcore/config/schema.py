"""Every key of kvcore's configuration: type, default, what is allowed, and one line of help.

Plain dataclasses: nothing here imports Hydra. `backends` and `plugins` are filled in from the dataclasses
of whatever is installed, see `kvcore.config.nodes`.
"""

# ruff: noqa: RUF009  (`key` makes a dataclass field)
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from kvcore.engine.sampling import SamplingParams

DTYPES = ("auto", "float32", "bfloat16", "float16")
CACHE_DTYPES = (*DTYPES, "fp8_e4m3", "fp8_e5m2", "int8", "int4")


def key(
    default: Any,
    help: str,
    *,
    choices: Sequence[str] | None = None,
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """A key with its help and its bounds; both are enforced by `kvcore.config.validate`."""
    metadata = {"help": help, "choices": choices, "least": least, "most": most}
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class ModelKeys:
    """The model; with `model.path` what the preset says of weights, geometry and chat no longer counts."""

    path: str | None = key(None, "Hugging Face directory or config.json, relative to the caller")
    dtype: str = key("auto", "dtype of weights and activations; auto: the checkpoint's", choices=DTYPES)
    weight_bytes: str | None = key(None, "bytes of the weights, where nothing else tells")
    name: str | None = key(None, "(preset) name shown to people")
    package: str | None = key(None, "(preset) package that brings the weights")
    chat: bool | None = key(None, "(preset) whether prompts go through the chat template")
    cpu_dtype: str | None = key(None, "(preset) what dtype=auto means on a CPU", choices=DTYPES)
    parameters: int | None = key(None, "(preset) number of weights", least=1)
    geometry: dict[str, Any] = key({}, "(preset) the content of config.json, inline")


@dataclass
class BackendByKind:
    """Another backend for the groups of one kind."""

    full: str = key("auto", "backend of groups that keep every token")
    window: str = key("auto", "backend of sliding-window groups")
    chunk: str = key("auto", "backend of chunked-attention groups")
    latent: str = key("auto", "backend of latent (MLA) groups")
    encoder: str = key("auto", "backend of cross-attention groups")


@dataclass
class DtypeByKind:
    """Another precision for the groups of one kind; auto follows `cache.dtype`."""

    full: str = key("auto", "dtype of groups that keep every token", choices=CACHE_DTYPES)
    window: str = key("auto", "dtype of sliding-window groups", choices=CACHE_DTYPES)
    chunk: str = key("auto", "dtype of chunked-attention groups", choices=CACHE_DTYPES)
    latent: str = key("auto", "dtype of latent (MLA) groups", choices=CACHE_DTYPES)
    encoder: str = key("auto", "dtype of cross-attention groups", choices=CACHE_DTYPES)


@dataclass
class CacheKeys:
    """The paged cache."""

    block_size: str = key(
        "auto", "tokens of a block; auto: smallest multiple of 16 that all backends take, more where pages are small"
    )
    dtype: str = key("auto", "element type; auto: as the checkpoint states, else the model's", choices=CACHE_DTYPES)
    dtype_by_kind: DtypeByKind = field(default_factory=DtypeByKind)
    scales: str | None = key(None, "granularity of scales of quantized types", choices=("tensor", "head", "token_head"))
    scale_file: str | None = key(None, "file with tensor or head scales")
    content: str = key("auto", "what a token stores; plugins bring more kinds")
    retention: str = key("auto", "how long tokens stay; plugins bring more kinds")
    placement: str = key("auto", "where pages lie; auto is slots", choices=("auto", "slots", "packed"))
    memory: str | None = key(None, "bytes of the arena, such as 2GiB; not with num_blocks")
    num_blocks: int | None = key(None, "blocks of the arena, null block included", least=1)
    utilization: float = key(0.9, "share of the device's memory that the engine may use", least=0.01, most=1)
    mla: str = key("auto", "latent attention: as latents, or keys and values", choices=("auto", "latent", "expanded"))
    swap_memory: str = key("0", "bytes of host memory for swapped requests")
    sanitize: bool = key(False, "poison cache content when it dies (NaN), for finding faults")
    prefix_caching: bool = key(True, "reuse the blocks of equal prompt beginnings")
    salt: str = key("", "isolates the prefixes of tenants")
    hash: str = key("sha256", "digest of prefix blocks", choices=("sha256", "xxh3"))
    eviction: str = key("lru", "which cached block goes first; plugins bring more policies")
    explain: bool = key(False, "keep what is needed to say why a prefix missed")
    explain_history: int | None = key(None, "how much of it is kept", least=1)


@dataclass
class EngineKeys:
    """Limits of the engine."""

    max_model_len: int | None = key(None, "longest sequence in tokens; default: the model's limit", least=1)
    max_num_seqs: int = key(256, "most requests in one step", least=1)
    max_num_batched_tokens: int = key(2048, "most tokens scheduled in one step", least=1)


@dataclass
class ParallelKeys:
    """Ranks."""

    tensor: int = key(1, "ranks that split every layer", least=1)
    pipeline: int = key(1, "ranks that split the layers", least=1)
    decode_context: int = key(1, "ranks that split the cached tokens", least=1)


@dataclass
class DeviceKeys:
    """The device, as a file of conf/device describes it: choose one by `device=NAME`."""

    preset: str = key("auto", "(preset) name of the file")
    kind: str = key("auto", "(preset) kind of device", choices=("auto", "cpu", "cuda", "rocm"))
    name: str = key("", "(preset) the device's name")
    capability: list[int] | None = key(None, "(preset) CUDA compute capability")
    arch: str = key("", "(preset) instruction set of a ROCm device")
    memory_bytes: int | None = key(None, "(preset) total memory", least=1)


@dataclass
class PlanKeys:
    """What `kvcore plan` reports."""

    lengths: list[int] = key([], "lengths at which whole sequences are counted")
    accounting: str | None = key(None, "count as another engine does")
    accounting_version: str | None = key(None, "which version of that engine")


@dataclass
class WhereKeys:
    """Which cases of the conformance kit run: those that have every value given here."""

    profile: str | None = key(None, "core profile: kv, latent, encoder, or none")
    content: str | None = key(None, "kv or latent")
    head_dim: str | None = key(None, "dimension of queries and keys")
    head_dim_v: str | None = key(None, "dimension of values")
    gqa: str | None = key(None, "query heads a KV head, or all")
    block_size: str | None = key(None, "tokens of a block")
    kernel_ratio: str | None = key(None, "kernel blocks in a block")
    dtype: str | None = key(None, "element type of queries")
    cache_dtype: str | None = key(None, "element type of the cache, or TYPE/GRANULARITY")
    mask: str | None = key(None, "causal, window, chunk, bidirectional or bidirectional+window")
    window: str | None = key(None, "tokens, or none, 1, P-1, P, P+1, long around a block of P tokens")
    sinks: str | None = key(None, "true or false")
    softcap: str | None = key(None, "the cap, or none")
    alibi: str | None = key(None, "true or false")
    phase: str | None = key(None, "prefill, chunked, decode, multi_token, mixed, prefix_hit, ...")


@dataclass
class KVCoreConfig:
    """The root."""

    model: ModelKeys = field(default_factory=ModelKeys)
    chat: str = key(
        "auto", "wrap prompts in the chat template; auto: what the preset says", choices=("auto", "true", "false")
    )
    backend: str = key("auto", "attention backend of every group")
    backend_by_kind: BackendByKind = field(default_factory=BackendByKind)
    backends: dict[str, Any] = key({}, "options of the installed backends")
    plugins: dict[str, Any] = key({}, "options of the installed plugins")
    cache: CacheKeys = field(default_factory=CacheKeys)
    engine: EngineKeys = field(default_factory=EngineKeys)
    parallel: ParallelKeys = field(default_factory=ParallelKeys)
    executor: str = key("inline", "where workers run", choices=("inline", "process", "ray"))
    device: DeviceKeys = field(default_factory=DeviceKeys)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompts: str | None = key(None, "UTF-8 file of prompts, one a line, empty lines skipped")
    plan: PlanKeys = field(default_factory=PlanKeys)
    level: str = key("quick", "how many cases `conform` runs", choices=("quick", "full"))
    where: WhereKeys = field(default_factory=WhereKeys)
    html: str | None = key(None, "file for the cross-backend matrix of `conform`, as one HTML page")
    a: str | None = key(None, "backend of one side of `diff`")
    b: str | None = key(None, "backend of the other side of `diff`")
    case: str | None = key(None, "case of the conformance kit for `diff`; without it, a whole model")
    what: str | None = key(None, "what `bench` measures", choices=("cache", "attention", "write", "engine"))
    format: str = key("text", "form of the picture of `layout`", choices=("text", "svg", "html"))
    output: str = key("text", "text, or exactly one JSON document on standard output", choices=("text", "json"))
