"""The cases themselves: each feature shows, each axis is covered, and sizes stay small."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kvcore.registry.loader import installed
from kvcore.testing import Base, Case, Seq, all_cases, cover, run
from kvcore.testing.cases.axes import windows
from kvcore.testing.cases.base import here, switch_on
from kvcore.testing.cases.case import AXES
from kvcore.testing.cases.extents import BOUNDS, extents
from kvcore.testing.checks.cell import CHECKS
from kvcore.testing.checks.context import Context, Instance
from kvcore.testing.checks.effect import hidden


def context(case):
    spec = installed().backend("torch")
    return Context(case, Instance(switch_on(spec, spec.Config(), here())[0]))


@pytest.mark.parametrize("level", ["quick", "full"])
def test_the_catalogue(level):
    found = all_cases(level)
    assert max(Counter(c.id for c in found).values()) == 1
    assert {c.check for c in found} <= set(CHECKS)
    assert {c.level for c in found} == {"L0", "L1", "L2", "L3", "L4", "L5"}
    values = {axis: {c.axes().get(axis) for c in found if c.axes()} for axis in AXES}
    assert {"kv", "latent", "encoder"} <= values["profile"]
    assert {"kv", "latent"} == values["content"]
    assert {1, 3, 4, 8, "all"} <= values["gqa"]
    assert {32, 64, 80, 96, 128, 192, 256} <= values["head_dim"]
    assert {"1", "P-1", "P", "P+1", "long", "none"} <= values["window"]
    assert {1, 2, 4} <= values["kernel_ratio"]
    assert {"causal", "window", "chunk", "bidirectional"} <= values["mask"]
    assert {"float32", "float16", "bfloat16", "float64"} <= values["dtype"]
    assert {"int8/token_head", "fp8_e4m3/tensor"} <= values["cache_dtype"]
    assert {"prefill", "chunked", "decode", "multi_token", "mixed", "prefix_hit"} <= values["phase"]
    assert {(c.k_scale, c.v_scale) for c in found if c.quant} >= {(0.3, 1.0), (1.0, 7.0), (7.0, 0.3)} - (
        {(7.0, 0.3)} if level == "quick" else set()
    )


def test_names_do_not_depend_on_the_base():
    """A backend whose blocks have at least 256 tokens is asked under the same names."""
    small, large = (
        {c.id for c in all_cases("full", base) if not c.id.count("=")} for base in (Base(), Base("float16", 64, 256))
    )
    assert small == large


def test_blocks_of_one_token():
    """One less than a block of one token is no window; nor is any other case of the catalogue empty."""
    assert windows(1) == {"1": 1, "P-1": 1, "P": 1, "P+1": 2, "long": 100}
    found = all_cases("full", Base(block_size=1, latent_block_size=1))
    assert {c.query().mask.window for c in found} >= {None, 1, 2, 100}
    assert all(s.scheduled > 0 and s.computed >= 0 for c in found for s in c.seqs)
    assert {c.id for c in all_cases("full") if "=" not in c.id} == {c.id for c in found if "=" not in c.id}


def test_quick_cases_stay_small():
    """An interpreter runs some hundred tiles a second; what is large is large along one axis."""
    found = [c for c in all_cases("quick") if c.seqs]
    assert np.median([c.cost for c in found]) < 150
    assert max(c.cost for c in found) < 5000
    assert sum(c.cost for c in cover(found)) < 50_000


def test_every_size_is_asked_at_level_quick():
    """Every range of every axis of size; a range that no case has could not be asked for by name."""
    found = [c.axes() for c in all_cases("quick") if c.seqs and c.level == "L2"]
    for axis in BOUNDS:
        assert {mine[axis] for mine in found} == set(extents(axis))


def not_shown(level, base):
    """What cases that attend do not show, as the kit itself finds out after each of them."""
    # The scenes are planned for torch, which serves no latents.
    cases = [c for c in all_cases(level, base) if (c.check, c.stores) == ("attend", "kv") and c.phase != "random"]
    found = {c.id: hidden(context(c).scene()) for c in cases}
    return {case: words for case, words in found.items() if words}


def test_every_feature_and_size_has_an_effect():
    """A case that would pass with its feature ignored, or a part of its keys lost, proves nothing."""
    assert not_shown("quick", Base("float16", 64, 16)) == {}


@pytest.mark.long
@pytest.mark.parametrize(
    ("level", "base"),
    [
        ("full", Base()),
        ("full", Base("float16", 64, 16)),
        ("quick", Base("bfloat16", 128, 16)),
        ("quick", Base("float16", 64, 256)),
    ],
)
def test_every_feature_and_size_has_an_effect_around_other_bases(level, base):
    assert not_shown(level, base) == {}


def test_what_shows_nothing_is_no_pass():
    """Six equal keys: without the window the answer is the same, and the case says so instead of passing."""
    case = Case("L2.attend.mine", "L2", "attend", seqs=(Seq(6, 1),), window=6, alibi=True)
    assert run("torch", [case])[0].outcome == "passed"
    result = run("torch", [replace(case, alibi=False, softcap=1e6)])[0]
    assert (result.outcome, result.reason) == ("skipped", "the case cannot show, around this base: softcap of L0")


def test_large_offsets_are_large():
    case = next(c for c in all_cases("full") if c.check == "offsets")
    scene = context(case).scene(elements=2**31 + 2**27)
    view = scene.views[scene.layers[0].layer.cache_id]["k"]
    blocks = {s // case.block_size for rows in scene.slots[0] for s in rows}
    assert max(blocks) * view.stride(0) > 2**31 > min(blocks) * view.stride(0)


def test_the_source_of_a_case_is_the_case():
    for case in all_cases("full"):
        assert eval(case.source(), {"Case": Case, "Seq": Seq}) == case


def test_a_cover_leaves_nothing_out():
    found = all_cases()
    small = cover(found)
    assert len(small) < len(found) / 2
    for axis in set(AXES) - {"block_size"}:
        assert {str(c.axes().get(axis)) for c in small} == {str(c.axes().get(axis)) for c in found}
    assert {(c.level, c.check) for c in small} == {(c.level, c.check) for c in found}


def test_where_selects():
    found = [r.case for r in run("torch", where={"window": "P+1", "phase": "decode"})]
    assert found
    assert {(c.window_name, c.phase) for c in found} == {("P+1", "decode")}
