"""`SceneLayer`: one layer of a scene: its facts, its tensors, and the numbers that it is given."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from kvcore.attention.backend import AttentionLayer
from kvcore.attention.query import AttentionQuery
from kvcore.memory.dtypes import torch_dtype
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import Content
from kvcore.testing.cases.case import Case
from kvcore.testing.oracle import stored
from kvcore.testing.oracle.attention import Array, Rules

# Keys that decide a row, and the bias of the farthest key under the smallest slope.
FEW, REACH = 8, 2


@dataclass
class SceneLayer:
    """One layer of a scene.

    Attributes:
        layer: What the backend is given.
        kv_group: Its KV group.
        group: Its attention group, among all of the scene.
        spec: Its cache.
        q: [T, H, D] in the query's dtype.
        k, v: Per sequence float64 [n, K, D], exact in the query's dtype; over latents, the latent as one
            head, and its first elements.
        own: What the oracle needs of the layer, taken before a backend sees its tensors.
        scales: Constant scales by field, float64, taken likewise.
    """

    layer: AttentionLayer
    kv_group: int
    group: int
    spec: KVCacheSpec
    q: torch.Tensor
    k: list[Array]
    v: list[Array]
    own: Rules
    scales: dict[str, Array | None]

    @property
    def content(self) -> Content:
        """Its content."""
        return self.spec.content

    @property
    def rounds_freely(self) -> bool:
        """Whether two right backends may hold unlike bytes: quantized codes that are equally near, own contents."""
        return stored.is_own(self.content) or getattr(self.content, "quant", None) is not None

    @property
    def query(self) -> AttentionQuery:
        """Its facts."""
        return self.layer.query

    def dense(self, name: str) -> list[Array]:
        """What the field `name` stands for."""
        return self.v if name == "v" else self.k

    def rules(self) -> Rules:
        """What the oracle needs."""
        return self.own

    def anew(self) -> SceneLayer:
        """The same with tensors and numbers of its own, for a backend or a check that changes some."""
        names = ("alibi_slopes", "sinks", "k_scale", "v_scale")
        tensors: dict[str, torch.Tensor | None] = {name: getattr(self.layer, name) for name in names}
        layer = replace(self.layer, **{n: None if t is None else t.clone() for n, t in tensors.items()})  # type: ignore[arg-type]
        k, v = ([x.copy() for x in numbers] for numbers in (self.k, self.v))
        return replace(self, layer=layer, q=self.q.clone(), k=k, v=v)


def make_layer(cache: CacheId, spec: KVCacheSpec, case: Case, kv_group: int, group: int, device: str) -> SceneLayer:
    """The layer of a case; its numbers depend on the case and on the number of the layer alone.

    Args:
        cache: Its cache.
        spec: What the cache stores.
        case: What is asked of the layer.
        kv_group: Its KV group.
        group: Its attention group.
        device: Where its tensors lie.
    """
    rng = np.random.default_rng((case.seed, cache.layer))
    q, k, v = _numbers(case, rng)

    def own(values: Array | None) -> torch.Tensor | None:
        return None if values is None else torch.tensor(values, dtype=torch.float32, device=device)

    layer = AttentionLayer(
        cache,
        case.query(),
        alibi_slopes=own(_slopes(case, cache.layer)) if case.alibi else None,
        sinks=own(_sinks(case, rng)) if case.sinks else None,
        k_scale=own(_constant_scale(case, case.k_scale, 1 + cache.layer / 4)),
        v_scale=own(_constant_scale(case, case.v_scale, 1 + cache.layer / 3)),
        shared=case.variant == "shared",
    )
    query, mask = layer.query, layer.query.mask
    slopes, sinks, k_scale, v_scale = (
        None if t is None else t.double().cpu().numpy().copy()
        for t in (layer.alibi_slopes, layer.sinks, layer.k_scale, layer.v_scale)
    )
    rules = Rules(
        query.softmax_scale,
        mask.causal,
        mask.window,
        mask.chunk,
        query.softcap,
        slopes,
        sinks,
        codes=stored.is_own(spec.content) or query.quant is not None,
    )
    return SceneLayer(layer, kv_group, group, spec, q.to(device), k, v, rules, {"k": k_scale, "v": v_scale})


def _numbers(case: Case, rng: np.random.Generator) -> tuple[torch.Tensor, list[Array], list[Array]]:
    """Queries, and keys and values a sequence."""
    dtype = torch_dtype(case.dtype)

    def draw(*shape: int) -> torch.Tensor:
        # Rounded first, so that the oracle sees the numbers that the backend is given.
        return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

    q = draw(case.tokens, case.num_heads, case.head_dim)
    q = (q.double() * torch.from_numpy(_query_sizes(case))[:, None, None]).to(dtype)
    if case.data:
        q = torch.from_numpy(_shaped(case.data, "q", q.double().numpy())).to(dtype)
    if case.quant == "token_head":
        # Large keys would leave a softmax of ones and zeros, which shows nothing.
        q = (q.double() / case.k_scale).to(dtype)
    dense: dict[str, list[Array]] = {"k": [], "v": []}
    for name, dim in (("k", case.head_dim), ("v", case.dim_v)):
        for seq in case.seqs:
            x = np.asarray(draw(seq.length, case.num_kv_heads, dim).double().numpy())
            if case.quant == "token_head":
                # Tokens and heads of unlike size, so that their scales differ.
                x *= rng.choice((0.5, 1.0, 2.0), size=(seq.length, case.num_kv_heads, 1))
                x *= case.k_scale if name == "k" else case.v_scale
                x = _rounded(x, dtype)
            if case.data:
                x = _rounded(_shaped(case.data, name, x), dtype)
            if seq.shared:
                x[: seq.shared] = dense[name][-1][: seq.shared]
            dense[name].append(x)
    if case.stores == "latent":
        dense["v"] = [x[:, :, : case.dim_v] for x in dense["k"]]
    return q, dense["k"], dense["v"]


def _query_sizes(case: Case) -> Array:
    """[T] sizes of the queries: however many keys there are, about 8 of them, anywhere, decide a row.

    Scores of variance ln(n / 8) leave n exp(-variance) = 8 keys of weight. Plain normal numbers would spread it over
    all n, so that a lost part of the keys changes little.
    """
    limits = [n for n in (case.window, case.chunk) if n is not None]
    visible = [min(s.length, *limits) if limits else s.length for s in case.seqs]
    sizes = [max(1.0, np.log(n / FEW)) ** 0.5 for n in visible]
    return np.repeat(sizes, [s.scheduled for s in case.seqs])


def _slopes(case: Case, layer: int) -> Array:
    """[H] ALiBi slopes from one half to one that still lets the farthest keys count; no two layers alike."""
    least = min(1 / 16, REACH / max(1, case.longest))
    share_H = np.linspace(0, 1, case.num_heads)
    return np.asarray(0.75**layer * 0.5 ** (1 - share_H) * least**share_H)


def _sinks(case: Case, rng: np.random.Generator) -> Array:
    """[H] sinks that weigh as much as a row's keys: of a short row in the first heads, of a long one in the last."""
    most = max(0.0, np.log(case.visible / FEW))
    apart_H = rng.permutation(np.linspace(-1.5, 1.5, case.num_heads))
    return np.asarray(1 + apart_H + np.linspace(0, most, case.num_heads))


def _constant_scale(case: Case, value: float, growth: float) -> Array | None:
    """[] or [K] scales; no two heads alike, nor two layers; those of keys and values part from layer to layer."""
    mine = value * growth
    if case.quant == "tensor":
        return np.asarray(mine)
    if case.quant == "head":
        return np.asarray(mine * 2 ** (np.arange(case.num_kv_heads) / case.num_kv_heads))
    return None


def _shaped(data: str, name: str, x: Array) -> Array:
    """Queries, keys or values that make roundings show.

    large   all scores of a row share about 200 (times sqrt(D / 64)), and differ by less than a rounding of such a
            number to 16 bits; the log-sum-exp is as large
    low     the same below 0: weights underflow unless the largest score is taken off, and 0 is not the largest
    even    scores near 0, so that nothing but the rounding of probabilities is left
    flat    scores near 0, values near 1: a sum of a thousand of them in 16 bits stands still or loses a percent
    """
    if data in ("even", "flat"):
        near_1 = 1 + x / 16 if data == "flat" else x
        return {"q": 0.05 * x, "k": x, "v": near_1}[name]
    if name == "v":
        return x
    signs_D = np.where(np.arange(x.shape[-1]) % 3 == 0, -1.0, 1.0)
    # Without what it has along the common direction already, so that differences stay as they are.
    across = x - (x @ signs_D)[..., None] * signs_D / len(signs_D)
    return np.asarray(across + (-5 if (data, name) == ("low", "q") else 5) * signs_D)


def _rounded(x: Array, dtype: torch.dtype) -> Array:
    return np.asarray(torch.from_numpy(x).to(dtype).double().numpy())
