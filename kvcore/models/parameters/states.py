"""Parameters of recurrent layers, by the shapes of the state that they keep."""

from __future__ import annotations

from kvcore.models.config_json import Fields
from kvcore.models.parameters.attention import Mixer, Switch, switched
from kvcore.models.parameters.weight import Weight, Weights, matrix, norm, vector
from kvcore.models.parts import CachePart, Recurrent
from kvcore.spec.dtypes import ceil_div


def _shapes(part: CachePart) -> dict[str, tuple[int, ...]]:
    return {name: shape for name, shape, _ in part.tensors} if isinstance(part, Recurrent) else {}


def convolution(name: str, channels: int, history: int, bias: bool, parts: int = 1) -> Weights:
    """A causal convolution of each channel by itself; its state keeps one column less than its width."""
    return [Weight(name, (channels, history + 1), parts=parts), *vector(f"{name}.bias", channels * bias, parts=parts)]


def mamba1(bias: Switch = "use_bias", conv_bias: Switch = "use_conv_bias", *, rank: str, norms: bool = False) -> Mixer:
    """Mamba (arXiv 2312.00752): A, B and C of every channel from one projection.

    Args:
        bias: Biases of the first and last projection.
        conv_bias: Bias of the convolution.
        rank: Field with the rank of the time step; ``auto`` is a sixteenth of the width.
        norms: Whether time step, B and C are normalized (Jamba).
    """

    def weights(fields: Fields, part: CachePart) -> Weights:
        shapes = _shapes(part)
        if not shapes:
            return []
        d, added = fields.integer("hidden_size"), switched(fields, bias)
        (inner, history), (_, states) = shapes["conv_state"], shapes["ssm_state"]
        given = fields.get(rank, "auto")
        steps = ceil_div(d, 16) if given == "auto" else fields.integer(rank)
        return [
            *matrix("mamba.in_proj", 2 * inner, d, bias=added, parts=inner),
            *convolution("mamba.conv1d", inner, history, switched(fields, conv_bias), parts=inner),
            *matrix("mamba.x_proj", steps + 2 * states, inner, parts=inner, rows=True),
            *matrix("mamba.dt_proj", inner, steps, bias=True, parts=inner),
            Weight("mamba.A_log", (inner, states), parts=inner),
            *vector("mamba.D", inner, parts=inner),
            *(norm("mamba.dt_layernorm", steps + 2 * states) if norms else []),
            *matrix("mamba.out_proj", d, inner, bias=added, parts=inner, rows=True),
        ]

    return weights


def mamba2(
    bias: Switch = "mamba_proj_bias",
    conv_bias: Switch = "mamba_conv_bias",
    *,
    out_bias: Switch | None = None,
    normed: Switch = True,
) -> Mixer:
    """Mamba-2 (arXiv 2405.21060): one projection to gate, convolution and time steps of the heads.

    Args:
        bias: Bias of the first projection.
        conv_bias: Bias of the convolution.
        out_bias: Bias of the last projection; None is as `bias`.
        normed: Whether the gated result is normalized.
    """

    def weights(fields: Fields, part: CachePart) -> Weights:
        shapes = _shapes(part)
        if not shapes:
            return []
        d, added = fields.integer("hidden_size"), switched(fields, bias)
        (channels, history), (heads, dim, _) = shapes["conv_state"], shapes["ssm_state"]
        inner = heads * dim
        out_added = added if out_bias is None else switched(fields, out_bias)
        return [
            *matrix("mamba.in_proj", inner + channels + heads, d, bias=added, parts=heads),
            *convolution("mamba.conv1d", channels, history, switched(fields, conv_bias), parts=heads),
            *(w for name in ("dt_bias", "A_log", "D") for w in vector(f"mamba.{name}", heads, parts=heads)),
            *vector("mamba.norm", inner * switched(fields, normed), parts=heads),
            *matrix("mamba.out_proj", d, inner, bias=out_added, parts=heads, rows=True),
        ]

    return weights


def delta_net(fields: Fields, part: CachePart) -> Weights:
    """A gated delta net (arXiv 2412.06464): queries, keys, values, a gate, and two numbers a value head."""
    shapes = _shapes(part)
    if not shapes:
        return []
    d = fields.integer("hidden_size")
    (channels, history), (heads, _, dim) = shapes["conv_state"], shapes["ssm_state"]
    return [
        *matrix("linear_attn.in_proj_qkv", channels, d, parts=heads),
        *matrix("linear_attn.in_proj_z", heads * dim, d, parts=heads),
        *matrix("linear_attn.in_proj_ba", 2 * heads, d, parts=heads),
        *convolution("linear_attn.conv1d", channels, history, False, parts=heads),
        *vector("linear_attn.dt_bias", heads, parts=heads),
        *vector("linear_attn.A_log", heads, parts=heads),
        *norm("linear_attn.norm", dim),
        *matrix("linear_attn.out_proj", d, heads * dim, parts=heads, rows=True),
    ]


def kimi_delta(fields: Fields, part: CachePart) -> Weights:
    """Kimi delta attention: forget gate and output gate of every dimension, each by two narrow matrices."""
    shapes = _shapes(part)
    if not shapes:
        return []
    d = fields.integer("hidden_size")
    (channels, history), (heads, dim, _) = shapes["conv_state"], shapes["ssm_state"]
    inner = heads * dim
    gates = [
        w
        for name in ("f", "g")
        for w in (
            *matrix(f"self_attn.{name}_a_proj", dim, d),
            *matrix(f"self_attn.{name}_b_proj", inner, dim, parts=heads),
        )
    ]
    return [
        *matrix("self_attn.qkv_proj", channels, d, parts=heads),
        *convolution("self_attn.conv1d", channels, history, False, parts=heads),
        *gates,
        *vector("self_attn.dt_bias", inner, parts=heads),
        *vector("self_attn.A_log", heads, parts=heads),
        *matrix("self_attn.b_proj", heads, d, parts=heads),
        *norm("self_attn.o_norm", dim),
        *matrix("self_attn.o_proj", d, inner, parts=heads, rows=True),
    ]


def short_convolution(fields: Fields, part: CachePart) -> Weights:
    """A gated short convolution (LFM2)."""
    shapes = _shapes(part)
    if not shapes:
        return []
    (d, history), added = shapes["conv_state"], fields.flag("conv_bias")
    return [
        *matrix("conv.in_proj", 3 * d, d, bias=added, parts=d),
        *convolution("conv.conv", d, history, added, parts=d),
        *matrix("conv.out_proj", d, d, bias=added, parts=d, rows=True),
    ]
