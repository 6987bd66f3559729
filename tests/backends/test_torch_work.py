"""What the torch backend does once, or not at all: work that no result shows."""

from dataclasses import replace

import kvcore_torch.attention as attention
import kvcore_torch.backend as backend
import kvcore_torch.tile_schedule as step
import numpy as np
import pytest
import torch
from kvcore_torch.options import TorchOptions
from kvcore_torch.quant import as_bytes
from kvcore_torch.tile_schedule import Tile

from kvcore.attention.backend import AttentionGroup

STEP = {"lengths": (30, 17), "scheduled": (20, 1), "first_blocks": (0, 0)}


def spied(monkeypatch, module, name):
    """The calls of a function that goes on doing its work."""
    calls, real = [], getattr(module, name)

    def spy(*args, **kwargs):
        calls.append((args, kwargs))
        return real(*args, **kwargs)

    monkeypatch.setattr(module, name, spy)
    return calls


def tile(queries=3, keys=5):
    position = torch.arange(queries)
    return Tile(slice(0, queries), slice(0, keys), position, position, position + 2, 0, True, None)


def test_masks_are_kept_for_the_other_layers(monkeypatch):
    small = tile()
    monkeypatch.setattr(step, "KEPT_MASK", 15)
    assert small.hidden_tn() is small.hidden_tn()
    assert small.hidden_tn().tolist() == [
        [False, False, True, True, True],
        [True, False, False, True, True],
        [True, True, False, False, True],
    ]
    large = tile(keys=6)
    assert large.hidden_tn() is not large.hidden_tn()


@pytest.mark.parametrize(
    ("bad", "query", "calls"),
    [
        (False, {}, 0),
        (True, {}, 1),
        # Nobody is to be kept from a value that everybody sees.
        (True, {"causal": False}, 0),
    ],
    ids=["finite", "not finite", "nothing hidden"],
)
def test_values_that_are_not_finite_cost_only_where_they_are(scene, monkeypatch, bad, query, calls):
    found = spied(monkeypatch, attention, "_contaminated")
    s = scene(query, **STEP)
    if bad:
        s.v[0][17] = torch.nan
    s.run()
    assert len(found) == calls


@pytest.mark.parametrize(
    ("dtype", "cache_dtype", "wide"),
    [
        ("float32", "float32", torch.float32),
        ("bfloat16", "float16", torch.float32),
        ("float64", "float32", torch.float64),
        ("float32", "float64", torch.float64),
    ],
)
def test_sums_are_as_wide_as_promised(scene, monkeypatch, dtype, cache_dtype, wide):
    found = spied(monkeypatch, backend, "attend_tile")
    scene({"dtype": dtype, "cache_dtype": cache_dtype}, **STEP).run()
    assert {keys.dtype for (_, _, keys, *_), _ in found} == {wide}


class Keeping(backend.TorchBackend):
    """Keeps the metadata of its last step."""

    def prepare(self, batch, group):
        self.kept = super().prepare(batch, group)
        return self.kept


def test_rows_are_picked_only_where_some_are_padding(scene):
    keeping = Keeping("cpu", TorchOptions())
    scene({}, **STEP).run(keeping)
    assert keeping.kept.write_rows is None
    padded = scene({}, **STEP)
    batch = padded.batch()
    batch.groups[0].slot_mapping_T[:3] = -1
    padded.batch = lambda: batch
    padded.run(keeping)
    assert keeping.kept.write_rows.tolist() == list(range(3, 21))


META = torch.device("meta")


def devices(tile):
    tensors = (tile.positions_t, tile.first_t, tile.end_t, tile.empty_t, tile.hidden_tn(), tile.distance_tn())
    return {t.device for t in tensors if t is not None}


def test_index_work_lies_on_the_device_of_the_step(scene):
    """The meta device stands for one that is not here: nothing may be left on the host, or be fetched."""
    s = scene({"window": 5}, **STEP)
    group = AttentionGroup(0, s.query, (s.layer,), s.config.kv_cache_groups[0].layout)
    made = step.schedule_tiles(s.batch(), group, META, head_first=True)
    for sequence in made.sequences:
        assert sequence.blocks.device == sequence.head_rows(4, 2).device == META
        assert all(devices(t) == {META} for t in sequence.tiles)
    rowless = replace(tile(), empty_t=torch.tensor([True, False, False]))
    moved = step._on_device(rowless, META)
    assert devices(moved) == {META}
    assert moved.empty_t.shape == (3,)
    assert step._on_device(rowless, torch.device("cpu")) is rowless


def test_rows_beyond_the_tokens_of_the_step_are_not_written(scene):
    """A padded step's tensors have more rows than tokens."""
    s = scene({}, **STEP)
    made, batch = backend.TorchBackend("cpu", TorchOptions()), s.batch()
    group = AttentionGroup(0, s.query, (s.layer,), s.config.kv_cache_groups[0].layout)
    fresh = {
        name: torch.cat([x[n - c :] for x, n, c in zip(rows, s.lengths, s.scheduled, strict=True)])
        for name, rows in (("k", s.k), ("v", s.v))
    }
    padded = {name: torch.cat([t, torch.full_like(t[:3], 7.0)]) for name, t in fresh.items()}
    made.write(s.layer, padded, s.cache, made.prepare(batch, group))
    assert all(torch.equal(s.slot("k", 0, j), s.k[0][j]) for j in range(10, 30))
    assert torch.equal(s.slot("v", 1, 16), s.v[1][16])


def test_spans_hold_what_some_query_sees_and_no_more(scene):
    keeping = Keeping("cpu", TorchOptions())
    settings = {"lengths": (61, 30, 17), "scheduled": (1, 1, 3), "first_blocks": (0, 0, 0)}
    scene({"window": 5}, **settings).run(keeping)
    # Blocks of 8: position 60 sees 56 to 60, position 29 sees 25 to 29, positions 14 to 16 see 10 to 16.
    spans = [(len(s.blocks), s.span.start, s.span.stop) for s in keeping.kept.sequences]
    assert spans == [(1, 0, 5), (1, 1, 6), (2, 2, 9)]
    assert keeping.kept.write_blocks.shape == keeping.kept.write_offsets.shape == (5,)


def test_queries_that_see_nothing_widen_no_span():
    first, last = np.array([5, 8, 9, 3]), np.array([5, 10, 11, 3])
    assert step._union(first, last) == (8, 11)
    assert step._union(np.array([4, 6]), np.array([4, 6])) == (4, 4)


@pytest.mark.parametrize(
    ("scores", "window", "rows"),
    [
        (2 * 50 * 7, 50, [7] * 14 + [2]),  # 7 queries of 2 heads that see 50 keys each
        (2 * 1 * 30, 1, [30, 30, 30, 10]),
        (1, 50, [1] * 100),
        (1 << 30, 50, [64, 36]),
    ],
)
def test_tiles_are_cut_by_their_scores(monkeypatch, scores, window, rows):
    monkeypatch.setattr(step, "TILE_SCORES", scores)
    position = np.arange(100, 200)
    first, last = position - window + 1, position + 1
    tiles = list(step._tiles(2, 10, position, first, last, int(first[0])))
    assert [t.rows.stop - t.rows.start for t in tiles] == rows
    assert (tiles[0].rows.start, tiles[-1].rows.stop) == (10, 110)
    assert all(t.num_keys == t.rows.stop - t.rows.start + window - 1 for t in tiles)
    assert all(t.empty_t is None for t in tiles)


def test_fp8_fields_are_indexed_as_bytes():
    """Where torch indexes fp8 at all, that differs from device to device and from release to release."""
    assert as_bytes(torch.zeros(2, dtype=torch.float8_e5m2)).dtype == torch.uint8
    whole = torch.zeros(2, dtype=torch.int8)
    assert as_bytes(whole) is whole
