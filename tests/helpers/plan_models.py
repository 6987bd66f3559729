"""Small random models and their layouts, for the properties of the planner."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, Plan, plan
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import Content, KVHeads, Latent, Quant, State
from kvcore.spec.layout import KernelBlocks, LayoutOption, hnd, nhd
from kvcore.spec.retention import Chunk, Encoder, Full, Latest, Retention, Window

small = st.integers(1, 3)
even = st.sampled_from([2, 4])
contents = st.one_of(
    st.builds(
        KVHeads, small, st.sampled_from([2, 4]), st.sampled_from([2, 4]), st.sampled_from(["float32", "float16"])
    ),
    st.builds(KVHeads, small, st.just(4), st.just(4), st.just("int8"), st.just(Quant("token_head"))),
    st.builds(KVHeads, small, st.just(4), st.just(4), st.just("int4"), st.just(Quant("token_head"))),
    st.builds(Latent, st.integers(2, 6), small, st.just("bfloat16")),
)
states = st.builds(
    lambda a, b: State(("conv", "ssm"), ((a, b), (b,)), ("float16", "float32")), small, st.integers(1, 9)
)
retentions = st.one_of(
    st.just(Full()),
    st.builds(Window, st.integers(1, 40)),
    st.builds(Chunk, st.integers(1, 40)),
    st.builds(Encoder, st.integers(1, 30)),
)


@dataclass(frozen=True)
class Model:
    """What `plan` needs to know of a model, and how it is to be placed."""

    caches: dict[CacheId, KVCacheSpec]
    offers: dict[CacheId, LayoutOffer]
    block_size: int
    placement: str

    def plan(self, budget: Budget, limits: Limits) -> Plan:
        """The plan for this model."""
        return plan(self.caches, self.offers, budget, limits, placement=self.placement, block_size=self.block_size)


@st.composite
def models(draw: st.DrawFn, placements: tuple[str, ...] = ("slots", "packed")) -> Model:
    """One to four classes of caches, their layers interleaved, with and without a backend's layout."""
    block_size = draw(st.sampled_from([4, 8, 12]))
    classes: list[tuple[KVCacheSpec, LayoutOffer]] = []
    for _ in range(draw(st.integers(1, 4))):
        if draw(st.integers(0, 4)) == 0:
            classes.append((KVCacheSpec(draw(states), Latest(draw(small))), LayoutOffer()))
            continue
        content, retention = draw(contents), draw(retentions)
        classes.append((KVCacheSpec(content, retention), draw(offers(content, block_size))))
    layers = draw(st.lists(st.sampled_from(classes), min_size=1, max_size=7))
    caches = {CacheId(i): spec for i, (spec, _) in enumerate(layers)}
    return Model(
        caches,
        {CacheId(i): offer for i, (_, offer) in enumerate(layers)},
        block_size,
        draw(st.sampled_from(placements)),
    )


@st.composite
def offers(draw: st.DrawFn, content: Content, block_size: int) -> LayoutOffer:
    """No backend, or one with a block-first layout at some kernel block size."""
    if draw(st.booleans()):
        return LayoutOffer()
    layout = draw(st.sampled_from([nhd, hnd]))(content, alignment=draw(st.sampled_from([16, 32, 256])))
    divisors = [d for d in (1, 2, 4, block_size) if block_size % d == 0]
    kernel = KernelBlocks((draw(st.sampled_from(divisors)),))
    return LayoutOffer("other", (LayoutOption(layout, kernel),))


limits = st.builds(
    Limits, max_model_len=st.integers(1, 300), max_num_batched_tokens=st.integers(1, 64), max_num_seqs=st.integers(1, 8)
)


def kv_first(content: KVHeads, kernel: KernelBlocks | None = None, backend: str = "kv_first") -> LayoutOffer:
    """A backend that offers [2, N, P, K, D] alone."""
    layout = nhd(content, name="kv_first", order="field_first")
    return LayoutOffer(backend, (LayoutOption(layout, kernel or KernelBlocks(multiple_of=16)),))


def block_first(content: KVHeads, kernel: KernelBlocks | None = None) -> LayoutOffer:
    """A backend that offers [N, K, P, D] pages of k and v alone."""
    return LayoutOffer("hnd", (LayoutOption(hnd(content), kernel or KernelBlocks(multiple_of=16)),))


def spec(content: Content, retention: Retention | None = None) -> KVCacheSpec:
    """A spec that keeps everything unless told otherwise."""
    return KVCacheSpec(content, retention or Full())
