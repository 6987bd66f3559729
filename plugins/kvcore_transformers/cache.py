"""`PagedCache`: a cache of transformers whose bytes lie in blocks of kvcore and are read by a kvcore backend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

import kvcore.cache
from kvcore.backend import ConfigError, IntegrityError, NotBuiltError
from kvcore.cache import KVCacheManager
from kvcore_transformers.attention import NAME
from kvcore_transformers.forward import ForwardPass
from kvcore_transformers.hooks import attach
from kvcore_transformers.padding import columns_of
from kvcore_transformers.sequences import Part, Sequences, Tokens


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """What a model asks of a layer's cache: how many columns it has seen. It holds no bytes."""

    is_compileable = False
    is_croppable = False  # not below the window; `PagedCache.crop` says when
    supports_early_init = False

    def __init__(self, cache: PagedCache) -> None:
        super().__init__()
        self.cache, self.columns = cache, 0

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The arena was allocated long ago."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The new keys and values as they are: `paged_attention` stores them, once padding is taken out."""
        self.cache.require_pass()
        self.columns += key_states.shape[2]
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns of keys, the first of them)."""
        return self.columns + query_length, 0

    def get_seq_length(self) -> int:
        """Columns seen."""
        return self.columns

    def get_max_length(self) -> int:
        """The longest sequence."""
        return int(self.cache.paged.limits.max_model_len)


class PagedCache(Cache):  # type: ignore[misc]
    """What `model.generate(past_key_values=...)` takes; made by `for_model`, for one model, and used for it alone.

    While a pass with this cache runs, and only then, the model's attention is ours: without the cache it is what
    it was before. One batch lives in the cache, until `reset`.

    Args:
        model: The model.
        paged: A cache that was planned for it.

    Attributes:
        paged: The arena, tables and bound backends.
        manager: Owner of the blocks; its `stats()` count them.
    """

    def __init__(self, model: torch.nn.Module, paged: kvcore.cache.PagedCache) -> None:
        count = model.config.get_text_config(decoder=True).num_hidden_layers  # type: ignore[union-attr,operator]
        super().__init__(layers=[PagedLayer(self) for _ in range(int(count))])
        self.model, self.paged = model, paged
        self._sequences = Sequences(paged)
        self._seen = np.zeros((0, 0), np.bool_)
        self._pass: ForwardPass | None = None
        self._broken = False
        configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
        self._configs: list[Any] = list({id(config): config for config in configs}.values())
        self._before: list[str | None] = []
        attach(model, PagedCache)

    @classmethod
    def for_model(cls, model: torch.nn.Module, **options: Any) -> Self:
        """Plan a cache for a model of transformers and allocate it.

        Args:
            model: A decoder with its weights, in evaluation mode.
            options: As `kvcore.PagedCache.for_model` takes them: ``backend``, ``backends``, ``cache`` and ``engine``
                among them. ``engine`` must have room for the padded batch: ``max_num_seqs`` sequences, and in a
                pass ``max_num_batched_tokens`` tokens, padding not counted.

        Raises:
            NotBuiltError: An encoder-decoder model.
            KVCoreError: As `kvcore.PagedCache.for_model`.
        """
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise NotBuiltError(
                "a paged cache holds no cross attention",
                field="model",
                got="an encoder-decoder model",
                allowed="decoder-only models",
            )
        return cls(model, kvcore.cache.PagedCache.for_model(model, **options))

    @property
    def manager(self) -> KVCacheManager:
        """Owner of the blocks."""
        return self._sequences.manager

    @property
    def batch_size(self) -> int:
        """Sequences of the batch; -1 before the first."""
        return len(self._seen) or -1

    # ---- a pass

    def begin(self, model: torch.nn.Module, given: dict[str, Any]) -> ForwardPass:
        """Begin a pass; the hooks of the model call it.

        Args:
            model: The model that is called.
            given: What it is called with, by name.

        Raises:
            KVCoreError: Something is asked for that is not served; see the page "Your backend in transformers".
        """
        self._check_call(model, given)
        input_ids = given["input_ids"]
        size, width = input_ids.shape
        seen = self._seen if len(self._seen) else np.zeros((size, 0), np.bool_)
        if len(seen) != size:
            raise ConfigError(
                "another number of sequences than the cache holds",
                field="input_ids",
                got=size,
                allowed=len(seen),
                remedy="call reset() on the cache before another batch",
            )
        columns = columns_of(given.get("attention_mask"), size, seen, width)
        tokens = [ids[mask] for ids, mask in zip(input_ids.cpu().numpy(), columns[:, seen.shape[1] :], strict=True)]
        self._check_room(columns)
        sequences = self._sequences
        if not sequences.rows:
            sequences.rows, sequences.fed = [-1] * size, [0] * size
        self._broken = True  # until the pass has ended
        parts = sequences.tell(tokens)
        _check_found(parts, tokens, given)
        sequences.begin(parts)
        self._seen = columns
        self._pass = ForwardPass(self.paged, (size, width), parts)
        self._before = [config._attn_implementation for config in self._configs]
        for config in self._configs:
            config._attn_implementation = NAME
        return self._pass

    def end(self, *, finished: bool) -> None:
        """End a pass; one that raised leaves a cache that must be reset."""
        found, self._pass = self._pass, None
        if found is None:
            return
        for config, name in zip(self._configs, self._before, strict=True):
            config._attn_implementation = name
        if finished:
            found.check_reached()
            self._sequences.finish()
            self._set_columns(self._seen.shape[1])
            self._broken = False

    def require_pass(self) -> None:
        """Raise `IntegrityError` unless a pass runs."""
        if self._pass is None:
            raise IntegrityError(
                "a module uses this cache outside a pass of the model that it was made for",
                field="past_key_values",
                got=None,
                allowed=f"a call of {type(self.model).__name__}",
                remedy="make one by PagedCache.for_model for the module that is called",
            )

    def _check_call(self, model: torch.nn.Module, given: dict[str, Any]) -> None:
        ids = given.get("input_ids")
        refused = (
            (model is not self.model, "past_key_values", "a cache of another model", "one made for this model"),
            (model.training, "training", True, "model.eval()"),
            (given.get("inputs_embeds") is not None, "inputs_embeds", "embeddings", "input_ids"),
            (
                not isinstance(ids, torch.Tensor) or ids.ndim != 2,
                "input_ids",
                type(ids).__name__,
                "[sequences, columns]",
            ),
            (given.get("use_cache") is False, "use_cache", False, True),
            (bool(given.get("output_attentions")), "output_attentions", True, False),
        )
        for wrong, field, got, allowed in refused:
            if wrong:
                raise ConfigError("a PagedCache does not serve this call", field=field, got=got, allowed=allowed)
        if self._broken:
            raise IntegrityError(
                "an earlier pass on this cache did not finish", field="past_key_values", remedy="call reset() on it"
            )

    def _check_room(self, columns: np.ndarray[Any, Any]) -> None:
        limits, new = self.paged.limits, columns[:, self._seen.shape[1] :]
        asked = {
            "max_num_seqs": (len(columns), limits.max_num_seqs),
            "max_num_batched_tokens": (int(new.sum()), limits.max_num_batched_tokens),
            "max_model_len": (int(columns.sum(1).max()), limits.max_model_len),
        }
        for name, (wanted, most) in asked.items():
            if wanted > most:
                raise ConfigError(
                    "this pass is larger than the cache was made for",
                    field=f"engine.{name}",
                    got=wanted,
                    allowed=most,
                    remedy=f"PagedCache.for_model(model, engine={{'{name}': {wanted}}})",
                )

    def _set_columns(self, columns: int) -> None:
        for layer in self.layers:
            layer.columns = columns

    # ---- between passes

    def reuse(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Begin a batch with what earlier ones left of its prompts; the next call is `generate` with the same.

        Only batches that began by this call are looked up, and only they can be found later. What is found takes no
        new blocks. Columns that are found in every sequence are not computed; in the others tokens are, whose
        attention is already there.

        Args:
            input_ids: int64 [sequences, columns] prompts.
            attention_mask: [sequences, columns], zeros for padding on the left.

        Returns:
            Columns that the model need not compute.

        Raises:
            IntegrityError: A batch is in the cache.
            ConfigError: As for the mask of a pass.
        """
        if len(self._seen) or self._broken:
            raise IntegrityError(
                "a batch is in this cache", field="past_key_values", got=self.batch_size, remedy="call reset() first"
            )
        size, width = input_ids.shape
        columns = columns_of(attention_mask, size, np.zeros((size, 0), np.bool_), width)
        held = self._sequences.find([ids[mask] for ids, mask in zip(input_ids.cpu().numpy(), columns, strict=True)])
        padding = (~columns).sum(1)
        common = int((padding + held).min())
        self._sequences.fed = np.maximum(common - padding, 0).tolist()
        self._seen = columns[:, :common]
        self._set_columns(common)
        return common

    def reset(self) -> None:
        """Give all blocks back, and be ready for another batch."""
        self._sequences.clear()
        self._seen, self._broken = np.zeros((0, 0), np.bool_), False
        self._set_columns(0)

    def crop(self, tokens_to_remove: int) -> None:
        """Take the last columns away: ``-tokens_to_remove`` of them.

        Raises:
            ConfigError: A positive number.
            NotBuiltError: A window has let go of tokens that the shorter sequences read.
        """
        columns = self._seen.shape[1] + tokens_to_remove
        if tokens_to_remove > 0 or columns < 0:
            raise ConfigError(
                "crop takes columns away",
                field="tokens_to_remove",
                got=tokens_to_remove,
                allowed=f"{-self._seen.shape[1]} to 0",
            )
        if columns == 0:
            self.reset()
        elif tokens_to_remove:
            self._sequences.truncate(self._seen[:, :columns].sum(1).tolist())
            self._seen = self._seen[:, :columns]
            self._set_columns(columns)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes what sequence ``beam_idx[i]`` was: no bytes move before somebody writes."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these sequences, in this order; one may be named several times."""
        chosen = np.arange(len(self._seen))[indices.cpu().numpy()].tolist()
        self._sequences.select(chosen)
        self._seen = self._seen[chosen]

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence becomes `repeats` of them that share their blocks."""
        self.batch_select_indices(torch.arange(len(self._seen)).repeat_interleave(repeats))

    def activate_past_recording(self) -> None:
        """Refused: assisted decoding takes rejected tokens out of a window again."""
        raise NotBuiltError(
            "assisted decoding on a PagedCache is not built",
            field="assistant_model",
            got="assisted or prompt-lookup decoding",
            allowed="greedy, sampled and beam decoding",
        )


def _check_found(parts: Sequence[Part], tokens: Sequence[Tokens], given: dict[str, Any]) -> None:
    skipped = sum(len(tokens[lane]) - part.count for part in parts for lane in part.lanes)
    if skipped and given.get("logits_to_keep") != 1:
        raise NotBuiltError(
            "tokens that reuse() found are not computed again, and have no logits",
            field="logits_to_keep",
            got=given.get("logits_to_keep"),
            allowed="1, as generate() asks it",
        )
