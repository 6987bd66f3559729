"""`kvcore layout format=svg|html`: drawn areas add up to the bytes of the plan, and are as wide as they say."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from plan_models import Model, limits, models
from real_configs import REAL, model_name

from kvcore.cli import main
from kvcore.cli.drawing.scene import Row, scene
from kvcore.cli.drawing.svg import WIDTH, svg
from kvcore.models.families import model_facts
from kvcore.plan.capacity import Limits
from kvcore.plan.config import KVCacheConfig
from kvcore.plan.planner import Budget, plan
from kvcore.settings.cache import CacheSettings

SVG = "{http://www.w3.org/2000/svg}"


def check(rows: list[Row], config: KVCacheConfig) -> None:
    """Every strip adds up to its row, the first two rows to the arena, and what has a place lies where it says."""
    for row in rows:
        for strip in row.strips:
            assert sum(a.nbytes for a in strip) == row.nbytes
            assert all(a.nbytes > 0 for a in strip)
            placed = sorted((a.offset, a.nbytes) for a in strip if a.offset is not None)
            assert all(at + n <= other for (at, n), (other, _) in pairwise(placed))
            assert all(at >= 0 and at + n <= row.nbytes for at, n in placed)
    if config.total_bytes:
        assert [row.nbytes for row in rows[:2]] == [config.total_bytes] * 2


@given(models(("auto", "slots", "packed")), st.integers(1, 1 << 18), limits)
def test_areas_add_up(model: Model, memory: int, limits: Limits) -> None:
    made = model.plan(Budget(memory=memory), limits)
    check(scene(made.capacity), made.configs[0])


@pytest.mark.parametrize("path", REAL, ids=model_name)
def test_areas_of_real_models_add_up(path: Path) -> None:
    facts = model_facts(json.loads(path.read_text()), dtype=None, cache=CacheSettings())
    owned = {c: replace(s, retention=s.retention.within(32768)) for c, s in facts.owned.items()}
    for placement in ("auto", "packed"):
        made = plan(owned, {}, Budget(memory=100 << 30), Limits(32768), placement=placement, shared=facts.shared)
        check(scene(made.capacity), made.configs[0])


@given(models(("slots", "packed")), st.integers(1, 1 << 16), limits)
def test_fields_are_drawn_where_their_views_begin(model: Model, memory: int, limits: Limits) -> None:
    """In the row of a page, each field at the distance from the page that its view has."""
    made = model.plan(Budget(memory=memory), limits)
    fields = [a for r in scene(made.capacity) for a in r.strips[0] if a.kind == "field"]
    for group in made.configs[0].kv_cache_groups:
        views = made.configs[0].field_views(group.cache_ids[0])
        drawn = {a.label: a.offset for a in fields if a.group == group.index}  # empty where another group has the same
        for view in views if drawn else ():
            assert drawn[view.name] == view.offset - views[0].offset


@pytest.mark.parametrize("name", ["Qwen3.5-122B", "Nemotron-H-56B", "gemma-4-26B-A4B", "Meta-Llama-3.1-70B"])
def test_areas_are_as_wide_as_their_bytes(name: str) -> None:
    path = next(p for p in REAL if name in p.name)
    facts = model_facts(json.loads(path.read_text()), dtype=None, cache=CacheSettings())
    made = plan(facts.owned, {}, Budget(memory=64 << 30), Limits(8192), shared=facts.shared)
    rows = scene(made.capacity)
    picture = ElementTree.fromstring(svg(rows, "a <model> & more"))
    strips = defaultdict(list)
    for rect in picture.iter(f"{SVG}rect"):
        if rect.get("class") == "area":
            strips[int(rect.get("data-row", -1)), rect.get("y")].append(rect)
            assert rect.findtext(f"{SVG}title")
    assert {row for row, _ in strips} == set(range(len(rows)))
    for (row, _), rects in strips.items():
        assert sum(int(r.get("data-bytes", 0)) for r in rects) == rows[row].nbytes
        for rect in rects:
            want = WIDTH * int(rect.get("data-bytes", 0)) / rows[row].nbytes
            assert float(rect.get("width", 0)) == pytest.approx(want, abs=0.001)
            padding = rect.get("data-kind") in ("padding", "begun", "between")
            assert (rect.get("fill") == "url(#padding)") == padding


def test_pictures_of_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["layout", "device=cpu", "cache.memory=64MiB"]
    assert main([*asked, "format=svg"]) == 0
    drawn = capsys.readouterr().out
    ElementTree.fromstring(drawn)
    assert "offset " in drawn
    assert main([*asked, "format=html"]) == 0
    page = capsys.readouterr().out
    assert page.startswith("<!doctype html>")
    assert "<td>L29</td>" in page
    assert main([*asked, "format=svg", "output=json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["picture"].rstrip() == drawn.rstrip()
    assert main([*asked, "format=png"]) == 2
