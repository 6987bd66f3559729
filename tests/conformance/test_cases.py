"""The cases themselves: each feature shows, each axis is covered, and sizes stay small."""

from collections import Counter

import numpy as np
import pytest

from kvcore.registry.loader import installed
from kvcore.testing import Base, all_cases, cover, run
from kvcore.testing.cases.axes import windows
from kvcore.testing.cases.base import here, switch_on
from kvcore.testing.cases.case import AXES
from kvcore.testing.checks.attend import without_each_feature
from kvcore.testing.checks.cell import CHECKS
from kvcore.testing.checks.context import Context, Instance
from kvcore.testing.oracle.tolerance import lse_tolerance, output_tolerance


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
    """An interpreter runs some hundred tiles a second."""
    found = [c for c in all_cases("quick") if c.seqs]
    assert sum(c.longest <= 100 for c in found) / len(found) > 0.9
    assert sum(len(c.seqs) <= 4 for c in found) / len(found) > 0.95
    assert np.median([c.cost for c in found]) < 100


def judged(level):
    # Random steps are judged like all others, but prove no feature: some are too short to show it. The scenes
    # are planned for torch, which serves no latents.
    cases = [c for c in all_cases(level) if c.check == "attend" and c.phase != "random"]
    return [c for c in cases if c.stores == "kv"]


def shows(case):
    """For each feature of the case, whether the answer without it is out of tolerance, in every layer."""
    found = {}
    scene = context(case).scene()
    for layer in scene.layers:
        q, keys = layer.query, max(len(k) for k in layer.k)
        answer = scene.answer(layer, written=False)
        tolerance = output_tolerance(answer, q.dtype, q.head_dim, keys)
        lse = lse_tolerance(answer, q.dtype, q.head_dim, keys)
        for name, rules in without_each_feature(layer.rules(), q.head_dim).items():
            other = scene.answer(layer, written=False, rules=rules)
            off = np.abs(other.out_THV - answer.out_THV) > 2 * tolerance
            visible = bool(off.any()) or bool((np.abs(other.lse_TH - answer.lse_TH) > 2 * lse).any() and q.lse)
            found[name] = found.get(name, True) and visible
    return found


def features_that_hide(level):
    for case in judged(level):
        if not without_each_feature(context_rules(case), case.head_dim):
            continue
        for name, visible in shows(case).items():
            # A window beyond every length changes nothing, and a backend must cope with that.
            if not visible and not (name == "window" and case.window > case.longest):
                yield case.id, name


def context_rules(case):
    from kvcore.testing.oracle.attention import Rules

    one = np.ones(case.num_heads)
    return Rules(
        case.query().softmax_scale,
        case.causal,
        case.window,
        case.chunk,
        case.softcap,
        one if case.alibi else None,
        one if case.sinks else None,
    )


def test_every_feature_has_an_effect():
    """A case that would pass with its feature ignored proves nothing."""
    assert list(features_that_hide("quick")) == []


@pytest.mark.long
def test_every_feature_has_an_effect_at_full_level():
    assert list(features_that_hide("full")) == []


def test_large_offsets_are_large():
    case = next(c for c in all_cases("full") if c.check == "offsets")
    scene = context(case).scene(elements=2**31 + 2**27)
    view = scene.views[scene.layers[0].layer.cache_id]["k"]
    blocks = {s // case.block_size for rows in scene.slots[0] for s in rows}
    assert max(blocks) * view.stride(0) > 2**31 > min(blocks) * view.stride(0)


def test_the_source_of_a_case_is_the_case():
    from kvcore.testing import Case, Seq

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
