"""Parameters of attention: projections of heads, latent attention and its sparse indexers."""

from __future__ import annotations

from collections.abc import Callable

from kvcore.models.config_json import Fields
from kvcore.models.parameters.weight import Weights, matrix, norm, vector
from kvcore.models.parts import CachePart, Heads, Indexer, LatentHeads

Switch = bool | str
Mixer = Callable[[Fields, CachePart], Weights]


def switched(fields: Fields, switch: Switch) -> bool:
    """A switch that the model type fixes, or the field that says it."""
    return fields.flag(switch) if isinstance(switch, str) else switch


def softmax(
    bias: Switch = False,
    out_bias: Switch | None = None,
    *,
    qk_norm: str | None = None,
    qk_switch: Switch = True,
    qk_bias: bool = False,
    gate: str | None = None,
    queries: int = 1,
    key_bias: bool = True,
) -> Mixer:
    """Projections of queries, keys, values and the output; none for other parts of a layer.

    Args:
        bias: Biases of queries, keys and values.
        out_bias: Of the output; None is as `bias`.
        qk_norm: ``head``: one norm over a head's dimensions; ``whole``: one number for each of all heads' dimensions.
        qk_switch: Whether there are such norms.
        qk_bias: Whether those norms shift as well.
        gate: ``head``: one gate a query head; ``full``: one for each of its dimensions.
        queries: How often queries are projected; 2 where the second are their gates.
        key_bias: Whether keys have a bias where queries have one (Whisper's have none).
    """

    def weights(fields: Fields, part: CachePart) -> Weights:
        if not isinstance(part, Heads):
            return []
        name = "self_attn" if part.role == "self" else part.role
        d, added = fields.integer("hidden_size"), switched(fields, bias)
        v_dim = part.head_dim if part.head_dim_v is None else part.head_dim_v
        h, k, owns = part.num_heads, part.num_kv_heads, part.shares is None
        found = matrix(f"{name}.q_proj", queries * h * part.head_dim, d, bias=added, parts=h)
        if owns:
            found += matrix(f"{name}.k_proj", k * part.head_dim, d, bias=added and key_bias, parts=k)
        if owns and not part.keys_are_values:
            found += matrix(f"{name}.v_proj", k * v_dim, d, bias=added, parts=k)
        out_added = added if out_bias is None else switched(fields, out_bias)
        found += matrix(f"{name}.o_proj", d, h * v_dim, bias=out_added, parts=h, rows=True)
        if qk_norm is not None and switched(fields, qk_switch):
            many = (h, k) if qk_norm == "whole" else (1, 1)
            found += norm(f"{name}.q_norm", many[0] * part.head_dim, qk_bias)
            found += norm(f"{name}.k_norm", many[1] * part.head_dim, qk_bias) if owns else []
        if gate is not None:
            found += matrix(f"{name}.g_proj", h * (v_dim if gate == "full" else 1), d, parts=h)
        return found + (vector(f"{name}.sinks", h, parts=h) if part.sinks else [])

    return weights


def latent(bias: Switch = "attention_bias", *, gate: str | None = None) -> Mixer:
    """Latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): every rank compresses, heads are shared out.

    Args:
        bias: Biases of the compressing projections and of the output.
        gate: ``head``: one gate a query head, ``full``: one for each dimension of its value.
    """

    def weights(fields: Fields, part: CachePart) -> Weights:
        if not isinstance(part, LatentHeads):
            return []
        d, added, h = fields.integer("hidden_size"), switched(fields, bias), part.num_heads
        nope, v_dim = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
        query, q_rank = h * (nope + part.rope_dim), fields.optional("q_lora_rank")
        if q_rank is None:
            found = matrix("self_attn.q_proj", query, d, parts=h)
        else:
            found = matrix("self_attn.q_a_proj", q_rank, d, bias=added)
            found += norm("self_attn.q_a_layernorm", q_rank)
            found += matrix("self_attn.q_b_proj", query, q_rank, parts=h)
        found += matrix("self_attn.kv_a_proj_with_mqa", part.rank + part.rope_dim, d, bias=added)
        found += norm("self_attn.kv_a_layernorm", part.rank)
        found += matrix("self_attn.kv_b_proj", h * (nope + v_dim), part.rank, parts=h)
        if gate is not None:
            found += matrix("self_attn.g_proj", h * (v_dim if gate == "full" else 1), d, parts=h)
        return found + matrix("self_attn.o_proj", d, h * v_dim, bias=added, parts=h, rows=True)

    return weights


def indexed(inner: Mixer) -> Mixer:
    """Attention whose sparse indexer (DeepSeek-V3.2) reads the compressed query; every rank holds it whole."""

    def weights(fields: Fields, part: CachePart) -> Weights:
        if not isinstance(part, Indexer):
            return inner(fields, part)
        d, heads = fields.integer("hidden_size"), fields.integer("index_n_heads")
        return [
            *matrix("self_attn.indexer.wq_b", heads * part.dim, fields.integer("q_lora_rank")),
            *matrix("self_attn.indexer.wk", part.dim, d),
            *norm("self_attn.indexer.k_norm", part.dim, bias=True),
            *vector("self_attn.indexer.weights_proj", heads * d),
        ]

    return weights
