"""Page layouts: where fields lie in a kernel page, checked byte by byte against the strides."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.errors import LayoutError
from kvcore.spec.content import Content, KVHeads, Latent, Quant, State
from kvcore.spec.layout import TOKEN, Axis, KernelBlocks, LayoutField, PageLayout, SizedLayout, hnd, nhd, plain_layout

ELEMENT_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8_e4m3": 1, "int32": 4}
dims = st.integers(1, 6)
plain_dtypes = st.sampled_from(["float32", "float16", "bfloat16"])
kv_plain = st.builds(KVHeads, dims, dims, dims, plain_dtypes)
kv_int8 = st.builds(KVHeads, dims, dims, dims, st.just("int8"), st.just(Quant("token_head")))
latents = st.builds(Latent, dims, st.integers(0, 3), plain_dtypes)
contents = st.one_of(kv_plain, kv_int8, latents)
alignments = st.sampled_from([4, 8, 16, 64, 256])


@st.composite
def sized(draw: st.DrawFn) -> tuple[Content, SizedLayout]:
    content = draw(contents)
    make = draw(st.sampled_from([nhd, hnd]))
    layout = make(content, alignment=draw(alignments))
    layout.check(content)
    return content, layout.at(draw(st.integers(1, 5)))


def bytes_of(place_strides: tuple[int, ...], shape: tuple[int, ...], offset: int, width: int) -> list[int]:
    """Every byte that the elements of a field cover, one entry for each time it is covered."""
    starts = [
        offset + sum(i * s for i, s in zip(index, place_strides, strict=True))
        for index in product(*(range(n) for n in shape))
    ]
    return [start + b for start in starts for b in range(width)]


@given(sized())
def test_fields_do_not_overlap_and_fill_what_the_content_stores(case: tuple[Content, SizedLayout]) -> None:
    content, layout = case
    covered: list[int] = []
    for place in layout.places:
        width = ELEMENT_BYTES[place.dtype]
        field = bytes_of(place.strides, place.shape, place.offset, width)
        assert len(field) == place.nbytes
        assert place.offset % layout.layout.alignment == 0
        assert place.offset % width == 0
        covered += field
    assert len(covered) == len(set(covered))
    assert max(covered) < layout.kernel_page_bytes
    assert layout.kernel_page_bytes % layout.layout.alignment == 0
    assert layout.payload_bytes == len(covered)
    # From outside: one token's fields by hand, times the tokens of a kernel block.
    assert len(covered) == token_bytes(content) * layout.kernel_block_size


def token_bytes(content: Content) -> int:
    """Bytes of one token, by the definition of each content."""
    if isinstance(content, Latent):
        return (content.rank + content.rope_dim) * ELEMENT_BYTES[content.dtype]
    assert isinstance(content, KVHeads)
    values = content.num_kv_heads * (content.head_dim + content.v_dim) * ELEMENT_BYTES[content.dtype]
    return values + (2 * content.num_kv_heads * 4 if content.quant else 0)


@given(sized())
def test_bytes_per_token_is_the_sum_of_the_fields(case: tuple[Content, SizedLayout]) -> None:
    content, _ = case
    assert content.bytes_per_token == token_bytes(content)
    assert content.bytes_per_request == 0


def test_nhd_and_hnd_name_the_axes_in_memory_order() -> None:
    content = KVHeads(3, 8, dtype="float16")
    (k, _) = nhd(content).at(4).places
    assert (k.shape, k.strides) == ((4, 3, 8), (48, 16, 2))
    (k, v) = hnd(content).at(4).places
    assert (k.shape, k.strides) == ((3, 4, 8), (64, 16, 2))
    assert v.offset == k.nbytes == 3 * 4 * 8 * 2


ORDERS = {"hnd": ("head", "token", "dim"), "nhd": ("token", "head", "dim"), "other": ("dim", "token")}


def ordered(**orders: str) -> PageLayout:
    """Fields in the order of a name; scales lack the elements."""
    axes = {
        name: tuple(
            Axis(axis, None if axis == TOKEN else 4) for axis in ORDERS[order] if axis != "dim" or "_" not in name
        )
        for name, order in orders.items()
    }
    return PageLayout("mixed", tuple(LayoutField(name, found, "float32") for name, found in axes.items()))


@pytest.mark.parametrize(("k", "v"), [("hnd", "nhd"), ("other", "hnd"), ("hnd", "other")])
def test_fields_that_lie_unlike_have_no_order(k: str, v: str) -> None:
    with pytest.raises(LayoutError, match="cannot read layout mixed") as error:
        ordered(k=k, v=v).kv_order("nhd", "hnd")
    assert error.value.field == "layout"
    assert error.value.allowed == ("nhd", "hnd")


@pytest.mark.parametrize("order", ["nhd", "hnd"])
def test_scales_lie_as_their_codes_do(order: str) -> None:
    layout = ordered(k=order, v=order, k_scale=order, v_scale=order)
    assert layout.kv_order("nhd", "hnd") == order
    with pytest.raises(LayoutError):
        layout.kv_order("hnd" if order == "nhd" else "nhd")


def x_packed(content: KVHeads, x: int) -> PageLayout:
    """Keys as (head, dim/x, token, x), values as (head, dim, token)."""
    heads = Axis("head", content.num_kv_heads)
    key = (heads, Axis("dim", content.head_dim // x), Axis(TOKEN, None), Axis("dim", x))
    value = (heads, Axis("dim", content.v_dim), Axis(TOKEN, None))
    return PageLayout("x_packed", (LayoutField("k", key, content.dtype), LayoutField("v", value, content.dtype)))


def test_x_packed_keys() -> None:
    content = KVHeads(2, 16, dtype="float16")
    layout = x_packed(content, 8)
    layout.check(content)
    k, v = layout.at(4).places
    assert (k.shape, k.strides) == ((2, 2, 4, 8), (128, 64, 16, 2))
    assert (v.shape, v.strides) == ((2, 16, 4), (128, 8, 2))


def test_a_token_axis_in_two_parts_wants_whole_parts() -> None:
    content = KVHeads(1, 4, dtype="float16")
    axes = (Axis(TOKEN, None), Axis("head", 1), Axis("dim", 4), Axis(TOKEN, 2))
    layout = PageLayout("pairs", tuple(LayoutField(n, axes, "float16") for n in ("k", "v")))
    layout.check(content)
    assert layout.at(6).places[0].shape == (3, 1, 4, 2)
    with pytest.raises(LayoutError, match="packs 2 tokens"):
        layout.at(5)


def test_int4_is_counted_in_whole_bytes() -> None:
    content = KVHeads(2, 8, dtype="int4", quant=Quant("token_head"))
    k, v, k_scale, _ = nhd(content).at(3).places
    assert (k.shape, k.strides, k.nbytes) == ((3, 2, 4), (8, 4, 1), 24)
    assert v.offset == 32  # 24 bytes, rounded up to 16
    assert k_scale.shape == (3, 2)


def test_an_int8_cache_has_four_fields() -> None:
    places = nhd(KVHeads(2, 8, dtype="int8", quant=Quant("token_head"))).at(16).places
    assert [p.name for p in places] == ["k", "v", "k_scale", "v_scale"]
    assert [p.dtype for p in places] == ["int8", "int8", "float32", "float32"]


@given(kv_plain, st.integers(1, 5), alignments)
def test_field_first_pieces_are_equal_or_refused(content: KVHeads, tokens: int, alignment: int) -> None:
    layout = nhd(content, name="kv_first", order="field_first", alignment=alignment)
    if content.head_dim != content.v_dim:
        with pytest.raises(LayoutError, match="equal bytes"):
            layout.at(tokens)
        return
    at = layout.at(tokens)
    assert [p.offset for p in at.places] == [0, 0]
    assert at.piece_bytes >= at.places[0].nbytes
    assert at.piece_bytes % alignment == 0
    assert at.kernel_page_bytes == 2 * at.piece_bytes


@given(sized(), sized())
def test_fingerprints_are_equal_exactly_where_reading_is(
    a: tuple[Content, SizedLayout], b: tuple[Content, SizedLayout]
) -> None:
    assert (a[1].fingerprint == b[1].fingerprint) == (reading(a[1]) == reading(b[1]))
    assert replace(a[1].layout, name="other").at(a[1].kernel_block_size).fingerprint == a[1].fingerprint


def reading(layout: SizedLayout) -> object:
    """Everything a reader has to know to find element by element what a writer stored in a page."""
    named = []
    for place, f in zip(layout.places, layout.layout.fields, strict=True):
        names = [a.name for a in f.axes]
        named.append((place.name, place.dtype, place.offset, place.shape, place.strides, names))
    return layout.layout.order, layout.kernel_block_size, named


def test_unlike_layouts_have_unlike_fingerprints() -> None:
    content = KVHeads(4, 4, dtype="float16")  # equal sizes: only the axes' names tell them apart
    shapes = [nhd(content).at(4), hnd(content).at(4), nhd(content, order="field_first").at(4)]
    shapes += [nhd(content).at(8), nhd(replace(content, dtype="bfloat16")).at(4)]
    shapes += [nhd(content, alignment=256).at(1), nhd(content, alignment=16).at(1)]
    assert len({s.fingerprint for s in shapes}) == len(shapes)


def test_plain_layout_of_a_state() -> None:
    state = State(("conv", "ssm"), ((3, 10), (2, 4, 4)), ("float16", "float32"))
    layout = plain_layout(state)
    layout.check(state)
    conv, ssm = layout.at(1).places
    assert (conv.shape, conv.offset, conv.nbytes) == ((3, 10), 0, 60)
    assert (ssm.shape, ssm.offset, ssm.nbytes) == ((2, 4, 4), 64, 128)
    assert state.bytes_per_request == 188
    assert state.bytes_per_token == 0


def kv_axes(heads: int = 2, dim: int = 4) -> tuple[Axis, ...]:
    return (Axis(TOKEN, None), Axis("head", heads), Axis("dim", dim))


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param((LayoutField("k", kv_axes(), "float16"),), id="a field is missing"),
        pytest.param(
            (LayoutField("k", kv_axes(), "float16"), LayoutField("v", kv_axes(dim=8), "float16")),
            id="a dimension is wrong",
        ),
        pytest.param(
            (LayoutField("k", kv_axes(), "float16"), LayoutField("v", kv_axes(), "bfloat16")), id="a dtype is wrong"
        ),
        pytest.param(
            (LayoutField("k", kv_axes(), "float16"), LayoutField("v", kv_axes()[1:], "float16")), id="no token axis"
        ),
        pytest.param(
            (LayoutField("k", kv_axes(), "float16"), LayoutField("v", (*kv_axes(), Axis("z", None)), "float16")),
            id="an open axis that is no token axis",
        ),
    ],
)
def test_a_layout_that_does_not_hold_the_content_is_refused(fields: tuple[LayoutField, ...]) -> None:
    with pytest.raises(LayoutError):
        PageLayout("bad", fields).check(KVHeads(2, 4, dtype="float16"))


def test_a_token_axis_has_no_place_in_a_state() -> None:
    state = State(("s",), ((4,),), ("float32",))
    axes = (Axis("s0", 4), Axis(TOKEN, 2))
    with pytest.raises(LayoutError):
        PageLayout("bad", (LayoutField("s", axes, "float32"),)).check(state)


@pytest.mark.parametrize("alignment", [0, -16, 3, 512])
def test_alignments_that_the_arena_cannot_keep_are_refused(alignment: int) -> None:
    with pytest.raises(LayoutError, match="alignment"):
        nhd(KVHeads(2, 4), alignment=alignment)


def test_alignment_below_an_element_is_refused() -> None:
    with pytest.raises(LayoutError, match="below an element"):
        nhd(KVHeads(1, 3, dtype="int8", quant=Quant("token_head")), alignment=2)


def test_fields_need_distinct_names() -> None:
    with pytest.raises(LayoutError, match="distinct"):
        PageLayout("bad", (LayoutField("k", kv_axes(), "float16"),) * 2)


@given(st.integers(1, 600), st.lists(st.integers(1, 64), min_size=1, max_size=4), st.integers(1, 64))
def test_kernel_blocks_fit(block_size: int, sizes: list[int], multiple: int) -> None:
    fitting = [s for s in sizes if block_size % s == 0]
    assert KernelBlocks(tuple(sizes)).fit(block_size) == (max(fitting) if fitting else None)
    fits = block_size in range(multiple, 601, multiple)
    assert KernelBlocks(multiple_of=multiple).fit(block_size) == (block_size if fits else None)


@pytest.mark.parametrize("arguments", [{}, {"sizes": (16,), "multiple_of": 16}])
def test_kernel_blocks_are_a_list_or_multiples(arguments: dict[str, object]) -> None:
    with pytest.raises(LayoutError):
        KernelBlocks(**arguments)  # type: ignore[arg-type]
