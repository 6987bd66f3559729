"""Conversion between layouts: every bit arrives, nothing else changes, and unlike caches are refused."""

import random

import pytest
import torch

from kvcore.errors import IntegrityError, LayoutError
from kvcore.memory.arena import Arena
from kvcore.memory.convert import convert_blocks, convert_slots, require_readable
from kvcore.memory.copy import copy_between
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.content import KVHeads, Quant
from kvcore.spec.layout import Axis, LayoutField, PageLayout, hnd, nhd
from kvcore.spec.retention import Full
from kvcore.testing.oracle.layout_bytes import PagedBytes

HALF = KVHeads(2, 8, dtype="float16")
INT8 = KVHeads(2, 8, dtype="int8", quant=Quant("token_head"))
INT4 = KVHeads(2, 8, dtype="int4", quant=Quant("token_head"))
WIDE = KVHeads(3, 4, 6, dtype="float64")
CACHES = (CacheId(0), CacheId(1))


def x_packed(content, x=4):
    """Keys as (head, dim/x, token, x), values as (head, dim, token)."""
    head, token = Axis("head", content.num_kv_heads), Axis("token", None)
    keys = (head, Axis("dim", content.head_dim // x), token, Axis("dim", x))
    values = (head, Axis("dim", content.v_dim), token)
    fields = (LayoutField("k", keys, content.dtype), LayoutField("v", values, content.dtype))
    return PageLayout("x_packed", fields)


def tokens_in_pairs(content):
    """The token axis split: (token/2, head, dim, 2)."""
    fields = tuple(
        LayoutField(f.name, (Axis("token", None), *(Axis(*a) for a in f.axes), Axis("token", 2)), f.dtype)
        for f in content.fields()
    )
    return PageLayout("tokens_in_pairs", fields)


def kv_first(content):
    return nhd(content, name="kv_first", order="field_first")


@pytest.fixture
def planned(plans):
    def make(content, layout, *, kernel=None, **keys):
        return plans.make([((0, 1), content, Full(), layout, kernel)], **keys)

    return make


def filled(config, seed=0):
    arena = Arena(config.total_bytes)
    torch.manual_seed(seed)
    arena.raw.copy_(torch.randint(-128, 128, (arena.nbytes,), dtype=torch.int8))
    return arena


def stored(arena, config, content, cache, slots):
    """The bytes of some slots by the kit's own arithmetic, per field."""
    paged = PagedBytes(arena.raw.numpy().view("uint8"), config)
    return {f.name: paged.memory[paged.where(cache, f.name, slots)].copy() for f in content.fields()}


LAYOUTS = {"nhd": nhd, "hnd": hnd, "kv_first": kv_first, "x_packed": x_packed, "tokens_in_pairs": tokens_in_pairs}
SIDES = [
    ("nhd", {}),
    ("hnd", {"kernel": 4}),
    ("kv_first", {"kernel": 2}),
    ("x_packed", {}),
    ("tokens_in_pairs", {"kernel": 4}),
    ("hnd", {"placement": "packed", "large_pages": 12}),
]


@pytest.mark.parametrize("left", SIDES, ids=str)
@pytest.mark.parametrize("right", SIDES, ids=str)
def test_there_and_back_bit_for_bit(planned, left, right):
    one, other = (planned(HALF, LAYOUTS[name](HALF), **dict(keys)) for name, keys in (left, right))
    source, middle, back = filled(one), filled(other, 1), filled(one, 2)
    pairs = [(3, 5), (1, 2), (7, 1)]
    convert_blocks(source, one, middle, other, 0, pairs)
    convert_blocks(middle, other, back, one, 0, [(b, a) for a, b in pairs])
    slots, moved = ([8 * p[i] + j for p in pairs for j in range(8)] for i in (0, 1))
    for cache in CACHES:
        want = stored(source, one, HALF, cache, slots)
        for arena, config, at in ((middle, other, moved), (back, one, slots)):
            got = stored(arena, config, HALF, cache, at)
            assert all((want[name] == got[name]).all() for name in want)


@pytest.mark.parametrize("content", [INT8, WIDE], ids=["int8 and its scales", "float64"])
def test_other_block_sizes_by_slot_and_nothing_else_is_touched(planned, content):
    one = planned(content, nhd(content), block_size=8)
    other = planned(content, hnd(content), block_size=12, kernel=6)
    source, target = filled(one), filled(other, 1)
    before = target.raw.clone()
    draw = random.Random(0)
    slots, moved = draw.sample(range(8, 90), 40), draw.sample(range(12, 130), 40)
    convert_slots(source, one, target, other, CACHES[1], slots, moved)
    want = stored(source, one, content, CACHES[1], slots)
    got = stored(target, other, content, CACHES[1], moved)
    assert all((want[name] == got[name]).all() for name in want)
    touched = torch.zeros(target.nbytes, dtype=torch.bool)
    paged = PagedBytes(target.raw.numpy().view("uint8"), other)
    for field in content.fields():
        touched[torch.from_numpy(paged.where(CACHES[1], field.name, moved))] = True
    assert torch.equal(before[~touched], target.raw[~touched])


def test_numbers_of_half_a_byte(planned):
    one, other = planned(INT4, nhd(INT4)), planned(INT4, hnd(INT4), kernel=4)
    source, target = filled(one), filled(other, 1)
    convert_blocks(source, one, target, other, 0, [(2, 4)])
    # Block 2, layer 0, by hand: 8 tokens x 2 heads x 4 bytes of k at the start of the page.
    page = one.kv_cache_tensors[0].block_stride
    written = source.raw[2 * page :][: 8 * 2 * 4].view(8, 2, 4)
    kernel = other.kv_cache_tensors[0].block_stride // 2
    for half in (0, 1):
        read = target.raw[4 * 2 * kernel + half * kernel :][: 2 * 4 * 4].view(2, 4, 4)
        assert torch.equal(read.transpose(0, 1), written[4 * half : 4 * half + 4])


def test_the_layer_state_of_a_request(plans):
    config = plans.build("stateful")
    target_config = plans.build("stateful_packed")
    source, target = filled(config), filled(target_config, 1)
    cache = CacheId(2)
    convert_slots(source, config, target, target_config, cache, [3], [4])
    content = config.group_of(cache).spec.content
    want = stored(source, config, content, cache, [3])
    got = stored(target, target_config, content, cache, [4])
    assert all((want[name] == got[name]).all() for name in want)


def test_a_cache_is_not_moved_to_an_unlike_layout_without_conversion(planned):
    one, other = planned(HALF, nhd(HALF)), planned(HALF, hnd(HALF))
    with pytest.raises(LayoutError, match=r"lie otherwise.*kvcore\.memory\.convert"):
        copy_between(filled(one), one, filled(other), other, 0, [(1, 2)])
    wanted, found = (c.kv_cache_groups[0].layout for c in (one, other))
    require_readable(planned(HALF, nhd(HALF)).kv_cache_groups[0].layout.fingerprint, wanted)
    with pytest.raises(LayoutError, match=r"fingerprint.*convert"):
        require_readable(found.fingerprint, wanted)


@pytest.mark.parametrize(
    ("slots", "targets", "error"),
    [
        ([1, 2], [3], "one to one"),
        ([1, 2], [3, 3], "one to one"),
        ([96], [3], "no such slot"),
        ([1], [-1], "no such slot"),
    ],
)
def test_impossible_moves(planned, slots, targets, error):
    one, other = planned(HALF, nhd(HALF)), planned(HALF, hnd(HALF))
    with pytest.raises(IntegrityError, match=error):
        convert_slots(filled(one), one, filled(other), other, CACHES[0], slots, targets)


def test_unlike_caches_are_refused(planned):
    one, other = planned(HALF, nhd(HALF)), planned(INT8, nhd(INT8))
    with pytest.raises(LayoutError, match="stores other things"):
        convert_slots(filled(one), one, filled(other), other, CACHES[0], [1], [1])
    with pytest.raises(LayoutError, match="hold other tokens"):
        convert_blocks(filled(one), one, filled(one), planned(HALF, nhd(HALF), block_size=16), 0, [(1, 1)])
    arena = filled(one)
    with pytest.raises(IntegrityError, match="one arena to another"):
        convert_slots(arena, one, arena, one, CACHES[0], [1], [2])
    one, other = planned(INT4, nhd(INT4)), planned(INT4, tokens_in_pairs(INT4))
    with pytest.raises(LayoutError, match="several numbers in a byte"):
        convert_slots(filled(one), one, filled(other), other, CACHES[0], [8], [8])
