"""What adapters share: a layer is a few parts (attention, latent attention, state); facts follow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

from kvcore.attention.query import AttentionQuery
from kvcore.errors import ModelError, Refusal
from kvcore.models.config_json import Fields
from kvcore.models.facts import CacheFacts, LengthRefusal, ModelAdapter, ModelFacts
from kvcore.models.nesting import TEXT_PARTS
from kvcore.models.parameters.count import weights_of
from kvcore.models.parameters.weight import ModelWeights
from kvcore.models.parts import CachePart, Indexer, LatentHeads, Recurrent
from kvcore.models.rope import longest_sequence, rope_settings, rope_type
from kvcore.models.stated_cache import quantization
from kvcore.settings.cache import CacheSettings
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import Content, IndexKeys, KVHeads, Latent, Quant, State
from kvcore.spec.dtypes import DTYPES
from kvcore.spec.retention import Latest

ASSUMED_LENGTH = 2048
LARGEST_ID = 1 << 31
MODEL_DTYPES = ("float32", "bfloat16", "float16")


class FamilyAdapter(ModelAdapter):
    """An adapter that describes one layer at a time.

    Attributes:
        remote: Model types that transformers 5.24 cannot build without code from the checkpoint.
        unproven: Model types that no test has shown to give transformers' own logits; `run` refuses them.
        length_field: The field with the number of positions.
        rotary: Whether positions are rotations that `rope_scaling` can stretch; learned ones end where they end.
        layer_kinds: What `layer_types` may say of a layer of this family.
    """

    remote: ClassVar[frozenset[str]] = frozenset()
    unproven: ClassVar[frozenset[str]] = frozenset()
    length_field: ClassVar[str] = "max_position_embeddings"
    rotary: ClassVar[bool] = True
    layer_kinds: ClassVar[tuple[str, ...]] = ("full_attention", "attention")

    @abstractmethod
    def layer(self, fields: Fields, index: int, cache: CacheSettings) -> Iterable[CachePart]:
        """The parts of one decoder layer, in the order in which it runs them."""

    def refusals(self, fields: Fields) -> Iterable[Refusal]:
        """Reasons of this family against `run`; those that hold for all are found by the base."""
        return ()

    def num_layers(self, fields: Fields) -> int:
        """Decoder layers."""
        return fields.layers

    def max_model_len(self, fields: Fields) -> int:
        """The model's own length limit, rope scaling included."""
        positions = fields.integer(self.length_field, ASSUMED_LENGTH)
        scaled = longest_sequence(fields, positions)
        return scaled if self.rotary else positions

    def check_lists(self, fields: Fields) -> None:
        """Refuse lists of layers that contradict the rest, those that the plan does not follow included."""
        fields.per_layer("layer_types", self.layer_kinds, self.num_layers(fields))

    def notes(self, fields: Fields) -> Iterable[str]:
        """Assumptions worth telling people."""
        if fields.get("max_position_embeddings") is None and fields.get("max_source_positions") is None:
            yield f"config.json names no length limit; {self.max_model_len(fields)} tokens are assumed"
        silent = [f"{k} {v}" for k, v in fields.assumed.items() if type(v) is int and k not in RUN_ONLY]
        if silent:
            yield f"config.json is silent on these; the defaults of {fields.model_type} hold: {', '.join(silent)}"

    def facts(self, config: Mapping[str, Any], *, dtype: str | None, cache: CacheSettings) -> ModelFacts:
        """Facts of a parsed `config.json`; see `ModelAdapter.facts`."""
        fields = Fields(config)
        fields.refuse_nulls(unless=RUN_ONLY)
        fields.refuse_broken_heads()
        element, notes = model_dtype(fields, dtype)
        layers = self.num_layers(fields)
        self.check_lists(fields)
        caches = tuple(
            cache_facts(CacheId(i, part.role), part, element, cache)
            for i in range(layers)
            for part in self.layer(fields, i, cache)
        )
        found = [
            *general_refusals(fields, self.remote, self.unproven),
            *self.refusals(fields),
            *content_refusals(caches),
        ]
        run_only, complaints = run_only_facts(fields)
        found += complaints
        return ModelFacts(
            model_type=fields.model_type,
            architecture=run_only["architectures"] or fields.model_type,
            num_layers=layers,
            max_model_len=self.max_model_len(fields),
            vocab_size=run_only["vocab_size"] or 0,
            dtype=element,
            caches=caches,
            refusals=tuple(found),
            eos_token_ids=run_only["eos_token_id"] or (),
            notes=(*notes, *self.notes(fields)),
            hidden_size=fields.optional("hidden_size") or 0,
        )

    def weights(self, config: Mapping[str, Any]) -> ModelWeights | None:
        """By the recipe of the model type, over the layers that this adapter describes."""
        fields, compressed = Fields(config), CacheSettings()
        layers = [tuple(self.layer(fields, i, compressed)) for i in range(self.num_layers(fields))]
        return weights_of(fields, layers)


def model_dtype(fields: Fields, asked: str | None) -> tuple[str, tuple[str, ...]]:
    """Element type of weights and activations, and a note where it had to be assumed."""
    if asked not in (None, "auto"):
        return _known_dtype(asked, "model.dtype"), ()
    given = fields.get("dtype")
    if given in (None, "auto") and fields.mapping("quantization_config"):
        return "bfloat16", ("config.json names no dtype; bfloat16 is assumed for a quantized checkpoint",)
    if given in (None, "auto"):
        # What transformers loads when the config is silent.
        return "float32", ("config.json names no dtype; float32 is assumed (model.dtype overrides it)",)
    return _known_dtype(str(given).removeprefix("torch."), "dtype"), ()


def _known_dtype(name: object, where: str) -> str:
    if not isinstance(name, str) or name not in MODEL_DTYPES:
        raise ModelError(
            "models run in one of three element types", field=where, got=name, allowed=(*MODEL_DTYPES, "auto")
        )
    return name


def run_only_facts(fields: Fields) -> tuple[dict[str, Any], list[Refusal]]:
    """Values that only a run needs, None where they are not usable, and a refusal for each of those."""
    found: dict[str, Any] = {}
    refusals = []
    for name, read in RUN_ONLY.items():
        try:
            found[name] = read(fields)
        except ModelError as error:
            found[name] = None
            refusals.append(
                Refusal(name, error.got, reason=f"{name} in config.json is not usable", remedy=f"give {error.allowed}")
            )
    return found, refusals


def _architecture(fields: Fields) -> str | None:
    listed = fields.listing("architectures")
    if listed and not isinstance(listed[0], str):
        raise ModelError("not a name", field="architectures", got=listed[0], allowed="a list of names")
    return listed[0] if listed else None


def eos_ids(value: Any, file: str = "config.json") -> tuple[int, ...]:
    """Ids that end a text, from the `eos_token_id` of a file; it may be one id or several, or null."""
    ids = list(value) if isinstance(value, Sequence) and not isinstance(value, str) else [value]
    kept = [i for i in ids if i is not None]
    for i in kept:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < LARGEST_ID:
            raise ModelError(
                f"eos_token_id in {file} is not usable",
                field="eos_token_id",
                got=value,
                allowed=f"a token id below {LARGEST_ID}, or a list of them",
            )
    return tuple(kept)


# What a run needs and a plan does not: each field and how it is read.
RUN_ONLY: Mapping[str, Callable[[Fields], Any]] = {
    "architectures": _architecture,
    "vocab_size": lambda fields: fields.integer("vocab_size", 0, least=0),
    "eos_token_id": lambda fields: eos_ids(fields.get("eos_token_id")),
}


def cache_facts(cache_id: CacheId, part: CachePart, dtype: str, choice: CacheSettings) -> CacheFacts:
    """Spec and query of one part of a layer."""
    if isinstance(part, Recurrent):
        names, shapes, types = zip(*part.tensors, strict=True)
        state = State(names, shapes, tuple(t or dtype for t in types), part.heads)
        return CacheFacts(cache_id, KVCacheSpec(state, Latest()), None)
    if isinstance(part, Indexer):
        return CacheFacts(cache_id, KVCacheSpec(IndexKeys(part.dim), part.retention), None)
    if isinstance(part, LatentHeads):
        return _latent_facts(cache_id, part, dtype, choice)
    cached, quant = cache_dtype(part.retention.kind, dtype, choice)
    v_dim = part.head_dim if part.head_dim_v is None else part.head_dim_v
    content: Content = KVHeads(part.num_kv_heads, part.head_dim, v_dim, cached, quant)
    query = AttentionQuery(
        content="kv",
        dtype=dtype,
        cache_dtype=cached,
        num_heads=part.num_heads,
        num_kv_heads=part.num_kv_heads,
        head_dim=part.head_dim,
        head_dim_v=v_dim,
        mask=part.mask,
        scale=part.scale,
        softcap=part.softcap,
        alibi=part.alibi,
        sinks=part.sinks,
        quant=None if quant is None else quant.granularity,
    )
    return CacheFacts(cache_id, KVCacheSpec(content, part.retention), query, part.shares)


def _latent_facts(cache_id: CacheId, part: LatentHeads, dtype: str, choice: CacheSettings) -> CacheFacts:
    cached, quant = cache_dtype("latent", dtype, choice)
    if quant is not None and quant.granularity != "tensor":
        # A latent page has no field for other scales.
        raise ModelError(
            "a latent cache has room for one scale a layer only",
            field="cache.scales",
            got=f"{cached} with {quant.granularity}",
            allowed="fp8 with tensor scales",
        )
    spec = KVCacheSpec(Latent(part.rank, part.rope_dim, cached), part.retention)
    if part.rate > 1:  # what reads them is no attention of ours
        return CacheFacts(cache_id, spec, None)
    query = AttentionQuery(
        content="latent",
        dtype=dtype,
        cache_dtype=cached,
        num_heads=part.num_heads,
        num_kv_heads=1,
        head_dim=part.rank + part.rope_dim,
        head_dim_v=part.rank,
        mask=part.mask,
        scale=part.scale,
        quant=None if quant is None else quant.granularity,
    )
    return CacheFacts(cache_id, spec, query)


def cache_dtype(kind: str, model: str, choice: CacheSettings) -> tuple[str, Quant | None]:
    """Element type and scales of a cache of one kind, as the user chose."""
    name = choice.dtype_of(kind)
    if name == "auto":
        name = model
    if not DTYPES[name].quantized:
        return name, None
    default = "tensor" if name.startswith("fp8") else "token_head"
    return name, Quant(choice.scales or default)  # type: ignore[arg-type]


def general_refusals(fields: Fields, remote: frozenset[str], unproven: frozenset[str]) -> Iterable[Refusal]:
    """Reasons against `run` that can stand in any config."""
    types = {*fields.types, fields.model_type}
    towers = [t for t in ("vision_config", "audio_config", *TEXT_PARTS) if fields.outer.get(t)]
    if fields.model_type in unproven or (types & unproven and not towers):
        yield Refusal("model_type", fields.model_type, reason="no test has proved its attention layers bridged yet")
    if types & remote:
        yield Refusal(
            "model_type", fields.model_type, reason="transformers 5.24 has no such model; checkpoint code is not run"
        )
    if towers:
        yield Refusal(
            towers[0],
            "present",
            reason="it is multimodal; run serves text-only checkpoints",
            remedy="use a text-only checkpoint of the model",
        )
    quantized = quantization(fields)
    if quantized:
        method = quantized.get("quant_method") or quantized.get("quant_algo") or "unnamed"
        yield Refusal(
            "quantization_config",
            method,
            reason="its weights are quantized and need kernels that kvcore lacks",
            remedy="use an unquantized (bfloat16) checkpoint, or dequantize it first",
        )
    if fields.flag("is_encoder_decoder"):
        yield Refusal("is_encoder_decoder", True, reason="it is an encoder-decoder; run serves decoders")
    kind = rope_type(fields)
    if kind in ("longrope", "su", "dynamic"):
        # transformers picks the frequencies by the longest position of the whole flattened batch.
        rope = rope_settings(fields)
        limit = rope.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
        if limit is None and kind == "dynamic":
            limit = fields.integer("max_position_embeddings")
        reason = "its rotary frequencies depend on the longest sequence of the batch beyond the original length"
        remedy = None if limit is None else f"set engine.max_model_len={limit} or less"
        yield LengthRefusal(
            "rope_parameters.rope_type",
            kind,
            reason=reason,
            remedy=remedy,
            applies_above=limit if isinstance(limit, int) else -1,
        )


def content_refusals(caches: Sequence[CacheFacts]) -> Iterable[Refusal]:
    """Reasons against `run` that follow from what the layers store."""
    kinds = {c.spec.content.kind for c in caches}
    if "state" in kinds:
        yield Refusal("layer_types", "recurrent", reason="recurrent state is not served yet")
    if "latent" in kinds:
        yield Refusal(
            "cache.mla", "latent", reason="no backend serves latent caches yet", remedy="set cache.mla=expanded"
        )


def unreachable(model_type: str) -> Refusal:
    """The refusal of modules that compute attention without asking the attention registry."""
    return Refusal("model_type", model_type, reason="its attention in transformers 5.24 ignores the attention registry")
