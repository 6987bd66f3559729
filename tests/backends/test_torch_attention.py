"""The torch backend against the dense float64 oracle, with poison wherever nobody may read."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

TOLERANCE = {"float64": 1e-12, "float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}

FEATURES = {
    "causal": {},
    "bidirectional": {"causal": False},
    "window": {"window": 5},
    "window_1": {"window": 1},
    "window_bidirectional": {"window": 4, "causal": False},
    "chunk": {"chunk": 6},
    "chunk_bidirectional": {"chunk": 6, "causal": False},
    "window_and_chunk": {"window": 5, "chunk": 12},
    "scale": {"scale": 0.9},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "sinks": {"sinks": True},
    "unlike_dims": {"head_dim_v": 5},
    "mqa": {"num_kv_heads": 1},
    "mha": {"num_kv_heads": 4},
    "everything": {"window": 9, "scale": 0.7, "softcap": 2.0, "alibi": True, "sinks": True, "head_dim_v": 3},
}
PHASES = {
    "decode": {"lengths": (1, 8, 9, 30), "scheduled": (1, 1, 1, 1), "first_blocks": (0, 0, 0, 0)},
    "prefill": {"lengths": (1, 8, 19), "scheduled": (1, 8, 19)},
    "chunked": {"lengths": (9, 30, 16), "scheduled": (3, 13, 8)},
    "mixed": {"lengths": (5, 17, 30), "scheduled": (1, 1, 7)},
}
PAGES = {
    "hnd": {"layout": "hnd"},
    "kv_first": {"layout": "kv_first"},
    "hnd_ratio_2": {"layout": "hnd", "kernel": 4},
    "kv_first_ratio_4": {"layout": "kv_first", "kernel": 2},
    "block_1": {"layout": "hnd", "block_size": 1},
}


def close(got, want, tolerance):
    np.testing.assert_allclose(got.double().numpy(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("feature", FEATURES)
def test_against_the_oracle(scene, feature, page, phase):
    query = dict(FEATURES[feature])
    if page.startswith("kv_first"):
        query.pop("head_dim_v", None)
    s = scene(query | {"lse": True}, **PAGES[page], **PHASES[phase])
    (out, lse), (want, want_lse) = s.run(), s.expected()
    close(out, want, TOLERANCE["float32"])
    close(lse, want_lse, TOLERANCE["float32"])
    # Without a log-sum-exp another softmax serves.
    plain, _ = s.run(want_lse=False)
    close(plain, want, TOLERANCE["float32"])


@pytest.mark.parametrize(("dtype", "cache_dtype"), list(itertools.product(TOLERANCE, TOLERANCE)))
def test_dtypes(scene, dtype, cache_dtype):
    s = scene({"dtype": dtype, "cache_dtype": cache_dtype, "lse": True, "window": 7})
    (out, lse), (want, want_lse) = s.run(), s.expected()
    assert out.dtype == getattr(torch, dtype)
    # Only the output is rounded to the query's dtype; the log-sum-exp is float32 throughout.
    close(out, want, TOLERANCE[dtype])
    close(lse, want_lse, 2e-6)


def test_float64_is_float64_throughout(scene):
    """Slopes and sinks are float32 numbers; what is made of them is not rounded again."""
    s = scene({"dtype": "float64", "cache_dtype": "float64", "alibi": True, "sinks": True, "lse": True})
    (out, lse), (want, want_lse) = s.run(), s.expected()
    close(out, want, 1e-12)
    close(lse, want_lse, 2e-6)


@pytest.mark.parametrize("lse", [True, False])
def test_large_scores_do_not_overflow(scene, lse):
    """Scores of some thousands: exp of them is no number."""
    s = scene({"scale": 2000.0, "sinks": True, "lse": lse})
    (out, found), (want, want_lse) = s.run(), s.expected()
    close(out, want, 1e-3)
    if lse:
        close(found, want_lse, 1e-5)


@pytest.mark.parametrize("feature", ["softcap", "alibi", "sinks", "scale", "window", "chunk", "bidirectional"])
def test_the_feature_has_an_effect(scene, feature):
    query = dict(FEATURES[feature])
    plain, used = scene().run()[0], scene(query).run()[0]
    assert (plain - used).abs().max() > 1e-2


def test_rows_of_the_live_tail(scene):
    """Window tables start in the middle of the sequence."""
    settings = {"lengths": (20, 30), "scheduled": (1, 5), "first_blocks": (1, 2)}
    s = scene({"window": 5, "alibi": True, "lse": True}, **settings)
    (out, lse), (want, want_lse) = s.run(), s.expected()
    close(out, want, 2e-6)
    close(lse, want_lse, 2e-6)


def test_a_row_without_keys_is_zero(scene):
    """The live tail begins after everything that the first queries of a chunk could see."""
    s = scene({"chunk": 8, "sinks": True, "lse": True}, lengths=(20,), scheduled=(20,), first_blocks=(1,))
    s.k[0][:8] = 0  # never stored
    batch = s.batch
    s.batch = lambda: _without_front(batch(), 8)
    out, lse = s.run()
    want, want_lse = s.expected()
    assert (out[:8] == 0).all()
    assert (lse[:8] == -torch.inf).all()
    close(out[8:], want[8:], 2e-6)
    close(lse[8:], want_lse[8:], 2e-6)


def _without_front(batch, count):
    batch.groups[0].slot_mapping_T[:count] = -1
    return batch


@pytest.mark.parametrize("layout", ["hnd", "kv_first"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_later_token_that_is_not_finite_spoils_no_earlier_query(scene, layout, bad):
    s = scene({"lse": True, "window": 6}, layout=layout, lengths=(30,), scheduled=(20,), first_blocks=(0,))
    clean, _ = s.run()
    dirty = scene({"lse": True, "window": 6}, layout=layout, lengths=(30,), scheduled=(20,), first_blocks=(0,))
    dirty.k[0][17] = torch.nan
    dirty.v[0][17] = bad
    out, lse = dirty.run()
    # Queries are positions 10 to 29; token 17 is seen by 17 to 22.
    assert torch.isnan(out[7:13]).all()
    assert torch.isnan(lse[7:13]).all()
    torch.testing.assert_close(out[:7], clean[:7])
    torch.testing.assert_close(out[13:], clean[13:])


@pytest.mark.parametrize("layout", ["hnd", "kv_first"])
def test_a_value_that_is_not_finite_spoils_those_that_see_it(scene, layout):
    step = {"layout": layout, "lengths": (30,), "scheduled": (20,), "first_blocks": (0,)}
    clean, clean_lse = scene({"lse": True, "window": 6}, **step).run()
    dirty = scene({"lse": True, "window": 6}, **step)
    dirty.v[0][17] = torch.nan
    out, lse = dirty.run()
    assert torch.isnan(out[7:13]).all()
    torch.testing.assert_close(out[:7], clean[:7])
    torch.testing.assert_close(out[13:], clean[13:])
    torch.testing.assert_close(lse, clean_lse)


def test_padding_slots_are_not_written(scene):
    s = scene(lengths=(8,), scheduled=(8,), first_blocks=(0,))
    batch = s.batch
    s.batch = lambda: _without_front(batch(), 3)
    s.run()
    assert all(torch.isnan(s.slot("k", 0, j)).all() for j in range(3))
    assert all(torch.equal(s.slot("v", 0, j), s.v[0][j]) for j in range(3, 8))


@pytest.mark.parametrize("layout", ["hnd", "kv_first"])
def test_long_prompts_are_cut_into_tiles(scene, layout, monkeypatch):
    import kvcore_torch.tile_schedule as step

    settings = {"layout": layout, "lengths": (100, 40), "scheduled": (90, 40), "first_blocks": (0, 0)}
    for query in ({"lse": True}, {"lse": True, "window": 10}, {"lse": True, "causal": False}):
        for scores in (4 * 100 * 7, step.TILE_SCORES):
            monkeypatch.setattr(step, "TILE_SCORES", scores)
            s = scene(query, **settings)
            (out, lse), (want, want_lse) = s.run(), s.expected()
            close(out, want, 2e-6)
            close(lse, want_lse, 2e-6)


def test_only_visible_blocks_are_gathered(scene, monkeypatch):
    import kvcore_torch.backend as module

    seen = []
    real = module.gather

    def spy(field, sequence, *args, **options):
        seen.append(len(sequence.blocks))
        return real(field, sequence, *args, **options)

    monkeypatch.setattr(module, "gather", spy)
    scene({"window": 5}, lengths=(61, 30), scheduled=(1, 1), first_blocks=(0, 0)).run()
    # Position 60 sees 56 .. 60: block 7 alone. Position 29 sees 25 .. 29: block 3.
    assert seen == [1, 1, 1, 1]


def test_equal_input_gives_equal_bits(scene):
    first = scene({"lse": True, "sinks": True}).run()
    again = scene({"lse": True, "sinks": True}).run()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_layouts_do_not_change_bits_much(scene):
    a, b = scene(layout="hnd").run()[0], scene(layout="kv_first").run()[0]
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_sequence_at_a_time(scene, monkeypatch):
    """When the next sequence's keys are gathered, those of the one before are gone."""
    import weakref

    import kvcore_torch.backend as module

    real, alive = module.gather, []

    def spy(field, sequence, *args, **options):
        held = {owner for owner, ref in alive if ref() is not None}
        assert held <= {id(sequence)}
        found = real(field, sequence, *args, **options)
        alive.append((id(sequence), weakref.ref(found)))
        return found

    monkeypatch.setattr(module, "gather", spy)
    for layout in ("hnd", "kv_first"):
        scene(layout=layout, **PHASES["mixed"]).run()
    assert len(alive) == 12


def draw_scene(data, scene):
    lengths = data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    scheduled = [data.draw(st.integers(1, n)) for n in lengths]
    heads = data.draw(st.sampled_from([1, 2, 3]))
    maybe = st.one_of(st.none(), st.integers(1, 30))
    query = {
        "num_kv_heads": heads,
        "num_heads": heads * data.draw(st.sampled_from([1, 2, 5])),
        "causal": data.draw(st.booleans()),
        "window": data.draw(maybe),
        "chunk": data.draw(maybe),
        "softcap": data.draw(st.sampled_from([None, 0.5, 3.0])),
        "scale": data.draw(st.sampled_from([None, 1.0])),
        "alibi": data.draw(st.booleans()),
        "sinks": data.draw(st.booleans()),
        "lse": data.draw(st.booleans()),
    }
    block, kernel = data.draw(st.sampled_from([(8, None), (8, 2), (4, 4), (12, 6), (16, 8)]))
    return scene(
        query,
        layout=data.draw(st.sampled_from(["hnd", "kv_first"])),
        block_size=block,
        kernel=kernel,
        lengths=tuple(lengths),
        scheduled=tuple(scheduled),
        first_blocks=(0,) * len(lengths),
        seed=data.draw(st.integers(0, 2**16)),
    )


def check_random(scene, data):
    s = draw_scene(data, scene)
    (out, lse), (want, want_lse) = s.run(), s.expected()
    close(out, want, 4e-6)
    if lse is not None:
        close(lse, want_lse, 4e-6)


# The fixture only makes scenes: nothing lives from one example to the next.
random_scenes = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@random_scenes
@given(data=st.data())
def test_random_scenes(scene, data):
    check_random(scene, data)


@pytest.mark.long
@settings(random_scenes, max_examples=1500)
@given(data=st.data())
def test_many_random_scenes(scene, data):
    check_random(scene, data)
