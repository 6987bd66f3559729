"""Where the bytes go: terms that add up to the arena, payload counted by hand, and remedies that work."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_models import Model, limits, models
from real_configs import REAL, model_name

from kvcore.errors import KVCoreError
from kvcore.models.families import model_facts
from kvcore.plan.capacity import Limits
from kvcore.plan.planner import Budget, Plan, plan
from kvcore.plan.terms import arena_terms
from kvcore.settings.cache import CacheSettings


def check(made: Plan) -> None:
    """What holds for every plan."""
    config, capacity = made.configs[0], made.capacity
    terms = arena_terms(capacity)
    assert sum(t.nbytes for t in terms) == config.total_bytes
    assert all(t.nbytes >= 0 for t in terms)
    sequences = capacity.simultaneous(made.limits.max_model_len)
    for group, held in zip(config.kv_cache_groups, capacity.resident(made.limits.max_model_len), strict=True):
        content = group.spec.content
        if content.per_request:
            each = content.bytes_per_request
        else:
            each = sum(f.nbytes for f in content.fields()) * group.block_size
        want = sequences * held * each * len(group.cache_ids)
        found = sum(t.nbytes for t in terms if (t.name, t.group) == ("payload", group.index))
        # Alignment between the fields of a kernel page is padding of the layout, a few bytes a page.
        assert want <= found <= want + sequences * held * group.ratio * len(group.cache_ids) * 512


@given(models(("auto", "slots", "packed")), st.integers(1, 1 << 20), limits)
def test_terms_add_up_to_the_arena(model: Model, memory: int, limits: Limits) -> None:
    check(model.plan(Budget(memory=memory), limits))


@pytest.mark.parametrize("path", REAL, ids=model_name)
def test_terms_of_real_models(path: Path) -> None:
    facts = model_facts(json.loads(path.read_text()), dtype=None, cache=CacheSettings())
    for length in (8192, 32768, facts.max_model_len):
        owned = {c: replace(s, retention=s.retention.within(length)) for c, s in facts.owned.items()}
        for gib in (40, 100):
            plans = [
                plan(owned, {}, Budget(memory=gib << 30), Limits(length), placement=p, shared=facts.shared)
                for p in ("auto", "slots", "packed")
            ]
            for made in plans:
                check(made)
            held = [made.capacity.concurrency(length) for made in plans]
            assert held[0] == max(held) or gib == 40
            assert len(plans[0].configs[0].kv_cache_groups) <= 8


@given(models(("auto", "slots", "packed")), st.integers(1, 1 << 16), limits)
def test_what_is_said_to_make_it_fit_does(model: Model, memory: int, limits: Limits) -> None:
    made = model.plan(Budget(memory=memory), limits)
    changes = made.as_dict()["remedies"]
    assert bool(changes) != made.fits
    for change in changes:
        key, value = change["key"].rpartition(".")[2], change["value"]
        if key == "memory":
            assert model.plan(Budget(memory=value), limits).fits
        else:
            # The same blocks, asked for less.
            assert replace(made, limits=replace(limits, **{key: value})).fits


def test_the_explanation_names_every_term_and_what_was_considered() -> None:
    path = next(p for p in REAL if "Qwen3.5" in p.name)
    facts = model_facts(json.loads(path.read_text()), dtype=None, cache=CacheSettings())
    made = plan(facts.owned, {}, Budget(memory=64 << 30), Limits(8192))
    text, data = made.explain(), made.as_dict()
    for term in data["arena"]:
        assert str(term["bytes"]) in text
    assert "packed (taken)" in text
    assert [c["placement"] for c in data["considered"]] == ["slots", "packed"]


def test_a_model_that_cannot_be_planned_is_no_test_of_terms() -> None:
    """The list of real configs above holds none that the planner refuses."""
    for path in REAL:
        try:
            model_facts(json.loads(path.read_text()), dtype=None, cache=CacheSettings())
        except KVCoreError as error:  # pragma: no cover
            pytest.fail(f"{path.name}: {error}")
