"""Hugging Face `transformers` models whose attention runs through a `ForwardContext`.

transformers looks attention up in a registry by name. We register one function under ``kvcore``, and a
mask function that builds nothing: masks follow from each layer's `AttentionQuery`. The batch is flat:
all sequences lie one after another in a batch of one, told apart by their positions and by the context.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from kvcore.attention.query import AttentionQuery
from kvcore.errors import ModelError, UnsupportedModelError, natural
from kvcore.models.bridge_checks import check_call
from kvcore.models.bridge_tuning import PositionTuning, take_over_tuning
from kvcore.models.config_json import config_file
from kvcore.models.facts import ModelFacts
from kvcore.models.forward_context import ForwardContext, ZeroContext
from kvcore.models.weights import read_header, weight_files
from kvcore.spec.cache_spec import CacheId

NAME = "kvcore"
KEYWORD = "kvcore_call"


class ForwardCall:
    """One forward pass: the context, the positions, and which caches were reached how often."""

    def __init__(self, owner: TransformersModel, context: ForwardContext, position_ids_T: torch.Tensor) -> None:
        self.queries = owner.queries
        self.longest = owner.facts.longest
        self.tuning = owner.tuning
        self.context = context
        self.position_ids_T = position_ids_T
        self.reached: Counter[CacheId] = Counter()

    def attend(
        self,
        module: torch.nn.Module,
        query_1HTD: torch.Tensor,
        key_1KTD: torch.Tensor,
        value_1KTDv: torch.Tensor,
        passed: dict[str, Any],
    ) -> torch.Tensor:
        """Attention of one module: [T, H, Dv]."""
        cache_id = CacheId(int(getattr(module, "layer_idx", -1)))
        query = self.queries.get(cache_id)
        if query is None:
            raise UnsupportedModelError(
                f"an attention layer has no cache: {type(module).__name__} with layer_idx {cache_id.layer}",
                field="layer_idx",
                got=cache_id.layer,
                allowed=f"{len(self.queries)} layers",
            )
        self.reached[cache_id] += 1
        query_THD, key_TKD, value_TKDv = (t.squeeze(0).transpose(0, 1) for t in (query_1HTD, key_1KTD, value_1KTDv))
        check_call(cache_id, module, query, (query_THD, key_TKD, value_TKDv), passed, self.longest)
        tuning = self.tuning.get(cache_id)
        if tuning is not None:
            query_THD = tuning.scale(query_THD, self.position_ids_T)
        return self.context.attend(cache_id, query_THD, key_TKD, value_TKDv, sinks=passed.get("s_aux"))

    def check_reached(self, model_type: str) -> None:
        """Raise unless every cache was reached exactly once.

        Raises:
            UnsupportedModelError: Names the caches that were missed or reached more often.
        """
        wrong = {str(c): self.reached[c] for c in self.queries if self.reached[c] != 1}
        if wrong:
            raise UnsupportedModelError(
                f"attention of {model_type} does not go through the attention registry once a layer",
                field="model_type",
                got=f"calls by layer: {wrong}",
                allowed="1 for each layer",
                remedy="this architecture cannot run on kvcore with this version of transformers",
            )


def kvcore_attention(
    module: torch.nn.Module,
    query_1HTD: torch.Tensor,
    key_1KTD: torch.Tensor,
    value_1KTDv: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **passed: Any,
) -> tuple[torch.Tensor, None]:
    """What transformers calls for every attention layer; returns [1, T, H, Dv] and no weights."""
    call = passed.pop(KEYWORD, None)
    if not isinstance(call, ForwardCall):
        raise UnsupportedModelError(
            f"{type(module).__name__} does not pass keyword arguments on to its attention",
            field="model_type",
            got=type(module).__name__,
            allowed="models called through TransformersModel",
        )
    return call.attend(module, query_1HTD, key_1KTD, value_1KTDv, passed).unsqueeze(0), None


def no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask tensor: every layer's mask is part of its `AttentionQuery`."""


def register() -> None:
    """Make ``attn_implementation="kvcore"`` known to transformers; may be called again."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, kvcore_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, no_mask)


class TransformersModel:
    """A loaded causal language model with its attention bridged.

    Args:
        module: The transformers model, made with ``attn_implementation="kvcore"``.
        facts: Its facts.

    Attributes:
        module: The transformers model.
        facts: Its facts.
        queries: The attention of each cache.
        tuning: Query scaling by position that the bridge took over from the module.
    """

    def __init__(self, module: torch.nn.Module, facts: ModelFacts) -> None:
        self.module = module
        self.facts = facts
        self.queries: dict[CacheId, AttentionQuery] = dict(facts.queries)
        self.tuning: dict[CacheId, PositionTuning] = take_over_tuning(module)

    @classmethod
    def load(cls, path: str | Path, facts: ModelFacts, *, dtype: str, device: str | torch.device) -> TransformersModel:
        """Load weights from local files alone.

        Args:
            path: A Hugging Face directory.
            facts: Facts of its `config.json`; its unconditional refusals are raised here.
            dtype: Element type of the weights, by name.
            device: Where they go.

        Raises:
            UnsupportedModelError: `facts` refuse the model.
            ModelError: Files are missing, truncated or do not fit the architecture.
        """
        facts.require_runnable(0)
        folder = config_file(path).parent
        for file in weight_files(folder):
            read_header(file)
        module = _from_pretrained(folder, facts, getattr(torch, dtype))
        return cls(module.to(device).eval(), facts)

    @property
    def weight_bytes(self) -> int:
        """Bytes of parameters and buffers, tied ones once."""
        tensors = {t.data_ptr(): t for t in (*self.module.parameters(), *self.module.buffers())}
        return sum(t.numel() * t.element_size() for t in tensors.values())

    def attention_tensors(self, cache_id: CacheId) -> dict[str, torch.Tensor]:
        """Tensors of a layer that its attention needs besides queries, keys and values.

        Args:
            cache_id: The layer's cache.

        Returns:
            ``sinks`` [H] in the model's dtype where the layer has them; else nothing.

        Raises:
            UnsupportedModelError: The facts declare sinks, but the module has none.
        """
        return attention_tensors(self.module, cache_id, self.queries[cache_id])

    @torch.inference_mode()
    def forward(
        self,
        input_ids_T: torch.Tensor,
        position_ids_T: torch.Tensor,
        logits_rows: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        """One step over a flattened batch.

        Args:
            input_ids_T: int64 [T] tokens of all sequences, one after another.
            position_ids_T: int64 [T] position of each token in its own sequence.
            logits_rows: int64 [n] rows of the batch whose logits are wanted; n may be 0.
            context: Serves every attention layer.

        Returns:
            float32 [n, V] logits.

        Raises:
            UnsupportedModelError: A layer was not reached exactly once, or calls attention with other
                facts than the config declares.
        """
        call = ForwardCall(self, context, position_ids_T)
        output = self.module(
            input_ids=input_ids_T.unsqueeze(0),
            position_ids=position_ids_T.unsqueeze(0),
            use_cache=False,
            logits_to_keep=logits_rows,
            **{KEYWORD: call},
        )
        call.check_reached(self.facts.model_type)
        logits_nV: torch.Tensor = output.logits[0]
        if logits_nV.shape[0] != logits_rows.shape[0]:
            raise UnsupportedModelError(
                f"{type(self.module).__name__} does not take the rows whose logits are wanted",
                field="logits_to_keep",
                got=logits_nV.shape[0],
                allowed=logits_rows.shape[0],
            )
        return logits_nV.float()

    def check_reached(self) -> None:
        """Prove on one token that every attention cache is reached exactly once.

        Raises:
            UnsupportedModelError: As `forward`, or the model cannot run without a mask and a cache at all.
        """
        device = next(self.module.parameters()).device
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        try:
            self.forward(zero, zero, zero, ZeroContext())
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            text = " ".join(str(error).split())
            raise UnsupportedModelError(
                f"{self.facts.model_type} does not run with its attention taken over: {text[:200]}",
                field="model_type",
                got=self.facts.model_type,
                allowed="models that run without mask and cache",
            ) from error


def attention_tensors(model: torch.nn.Module, cache_id: CacheId, query: AttentionQuery) -> dict[str, torch.Tensor]:
    """As `TransformersModel.attention_tensors`, of a module alone."""
    if not query.sinks:
        return {}
    for module in model.modules():
        sinks = getattr(module, "sinks", None)
        if getattr(module, "layer_idx", None) == cache_id.layer and isinstance(sinks, torch.Tensor):
            return {"sinks": sinks.detach()}
    raise UnsupportedModelError(
        f"layer {cache_id.layer} should have sinks, but its module has no such parameter",
        field="sinks",
        got=None,
        allowed=f"[{query.num_heads}]",
    )


def _from_pretrained(folder: Path, facts: ModelFacts, dtype: torch.dtype) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    register()
    progress = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        module, report = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=dtype,
            attn_implementation=NAME,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, ImportError) as error:
        # from_pretrained has no error class of its own; whatever it says becomes one line of ours.
        text = " ".join(str(error).split())
        raise ModelError(
            f"transformers cannot load {facts.architecture}: {text[:300]}",
            field="model.path",
            got=str(folder),
            allowed="a checkpoint that transformers knows",
        ) from error
    finally:
        if progress:
            logging.enable_progress_bar()
    for kind in ("missing_keys", "mismatched_keys"):
        if report.get(kind):
            names = sorted((str(k[0] if isinstance(k, tuple) else k) for k in report[kind]), key=natural)
            raise ModelError(
                f"the weights do not fit {facts.architecture}: {kind.replace('_', ' ')}",
                field="model.path",
                got=names[:5],
                allowed="every parameter of the architecture",
            )
    return module  # type: ignore[no-any-return]
