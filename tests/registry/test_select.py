"""Selection: who is chosen, who is not and why; and that nothing falls back silently."""

from dataclasses import dataclass
from types import ModuleType

import pytest

from kvcore.attention.declaration import BackendSpec, DeviceFacts
from kvcore.attention.query import AttentionQuery, Capabilities, Mask
from kvcore.errors import BackendUnavailableError, BackendUnsupportedError, Refusal, UnknownBackendError
from kvcore.registry.choice import BackendChoice
from kvcore.registry.hookspecs import hookimpl
from kvcore.registry.loader import load
from kvcore.registry.records import PluginSource
from kvcore.registry.select import choose_backends
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, Latent, State
from kvcore.spec.layout import KernelBlocks, LayoutOption, hnd, nhd
from kvcore.spec.retention import Full, Latest, Window

CPU = DeviceFacts("cpu")
H100 = DeviceFacts("cuda", capability=(9, 0), present=False)
FULL, WINDOW = CacheId(0), CacheId(1)
KV = KVHeads(2, 64, dtype="float32")
CACHES = {FULL: KVCacheSpec(KV, Full()), WINDOW: KVCacheSpec(KV, Window(16))}


@dataclass(frozen=True)
class Options:
    interpret: bool = False


def query(**changes):
    facts = {"dtype": "float32", "cache_dtype": "float32", "num_heads": 4, "num_kv_heads": 2}
    return AttentionQuery("kv", head_dim=64, head_dim_v=64, **{**facts, **changes})


QUERIES = {FULL: query(), WINDOW: query(mask=Mask(window=16))}


def backend(called, *, rank=0, features=(), missing=None, devices=("cpu", "cuda"), layouts=None, blocks=1):
    class Spec(BackendSpec):
        name = called
        priority = {"cpu": rank, "cuda": rank}
        Config = Options

        @classmethod
        def unavailable(cls, options):
            return missing

        @classmethod
        def unsupported_device(cls, facts, options):
            if facts.kind in devices or options.interpret:
                return None
            return Refusal("device", facts.kind, devices)

        @classmethod
        def unsupported(cls, asked, options):
            return Capabilities(dtypes=("float32",), features=features).check(asked)

        @classmethod
        def layouts(cls, spec, facts, options):
            if spec.content.kind != "kv":
                return []
            offered = layouts or [hnd(spec.content), nhd(spec.content)]
            return [LayoutOption(layout, KernelBlocks(multiple_of=blocks)) for layout in offered]

        @classmethod
        def create(cls, device, options):
            raise AssertionError("never in these tests")

    return Spec


def registry_of(*specs, **hooks):
    plugin = ModuleType("plugin")
    plugin.kvcore_backends = hookimpl(lambda: specs)
    for name, function in hooks.items():
        setattr(plugin, name, hookimpl(function))
    return load([PluginSource("p", "dist", "1", lambda: plugin)])


def choose(registry, choice=None, *, device=CPU, caches=None, queries=None, **kwargs):
    return choose_backends(
        caches or CACHES, QUERIES if queries is None else queries, device, choice or BackendChoice(), registry, **kwargs
    )


def statuses(row):
    return {c.name: c.status for c in row.candidates}


def test_priority_decides_and_every_candidate_is_listed_with_its_reason():
    registry = registry_of(
        backend("slow", rank=1, features=("window",)),
        backend("narrow", rank=3),
        backend("absent", rank=9, features=("window",), missing="pip install it"),
    )
    full, window = choose(registry).classes
    assert statuses(full) == {"absent": "unavailable", "narrow": "chosen", "slow": "usable"}
    assert statuses(window) == {"absent": "unavailable", "narrow": "unsupported", "slow": "chosen"}
    reason = window.as_dict()["candidates"][1]["reason"]
    assert reason == {"field": "window", "got": 16, "allowed": "none"}
    assert full.as_dict()["candidates"][0]["installed_here"] is False


def test_offers_carry_the_layouts_in_order_of_preference():
    offers = choose(registry_of(backend("a", features=("window",)))).offers
    assert [o.layout.name for o in offers[FULL].options] == ["hnd", "nhd"]
    assert (offers[FULL].backend, offers[FULL].max_offset_bits) == ("a", 31)


def test_priority_by_kind_of_cache_wins_over_that_of_the_device():
    special = backend("special", features=("window",))
    special.priority = {"cpu": 0, "cpu/window": 50}
    full, window = choose(registry_of(special, backend("usual", rank=5, features=("window",)))).classes
    assert (full.chosen.name, window.chosen.name) == ("usual", "special")


def test_by_name_and_by_kind():
    registry = registry_of(backend("a", rank=2, features=("window",)), backend("b", features=("window",)))
    full, window = choose(registry, BackendChoice("b", {"window": "a"})).classes
    assert (full.chosen.name, window.chosen.name) == ("b", "a")
    full, window = choose(registry, BackendChoice(by_kind={"window": "b"})).classes
    assert (full.chosen.name, window.chosen.name) == ("a", "b")


def test_an_explicit_choice_that_cannot_serve_names_the_fact_and_the_nearest_that_can():
    registry = registry_of(backend("narrow", rank=3), backend("wide", features=("window",)))
    with pytest.raises(BackendUnsupportedError) as caught:
        choose(registry, BackendChoice("narrow"))
    assert (caught.value.field, caught.value.got) == ("window", 16)
    assert "backend=wide" in caught.value.remedy
    with pytest.raises(BackendUnsupportedError) as caught:
        choose(registry, BackendChoice(by_kind={"window": "narrow"}))
    assert "backend_by_kind.window=wide" in caught.value.remedy


def test_an_explicit_choice_that_is_missing_here_is_an_error_in_run_and_fine_in_plan():
    registry = registry_of(backend("gone", features=("window",), missing="pip install gone"), backend("b"))
    with pytest.raises(BackendUnavailableError, match="pip install gone"):
        choose(registry, BackendChoice("gone"))
    selection = choose(registry, BackendChoice("gone"), purpose="plan")
    assert [c.chosen.name for c in selection.classes] == ["gone", "gone"]
    assert selection.classes[0].chosen.verdict.installed_here is False


def test_unknown_names_are_errors_even_where_no_group_would_use_them():
    registry = registry_of(backend("a", features=("window",)))
    for choice in (BackendChoice("nope"), BackendChoice(by_kind={"latent": "nope"})):
        with pytest.raises(UnknownBackendError):
            choose(registry, choice, purpose="plan")


def test_auto_with_none_usable_lists_all_reasons_in_run_and_plans_without_one():
    registry = registry_of(backend("a"), backend("b", missing="pip install b"))
    caches = {WINDOW: CACHES[WINDOW]}
    with pytest.raises(BackendUnsupportedError) as caught:
        choose(registry, caches=caches)
    assert "a: window: 16" in str(caught.value)
    assert "b: window: 16" in str(caught.value)
    planned = choose(registry, caches=caches, purpose="plan")
    assert planned.offers[WINDOW].backend is None
    listed = choose(registry, caches=caches, strict=False)
    assert listed.classes[0].chosen is None


def test_plan_still_refuses_a_device_that_the_backend_does_not_serve():
    registry = registry_of(backend("gpu", features=("window",), devices=("cuda",)))
    with pytest.raises(BackendUnsupportedError) as caught:
        choose(registry, BackendChoice("gpu"), purpose="plan")
    assert (caught.value.field, caught.value.got) == ("device", "cpu")
    assert choose(registry, device=H100).classes[0].chosen.name == "gpu"


def test_auto_never_takes_a_stand_in_but_an_explicit_choice_does():
    registry = registry_of(
        backend("gpu", rank=9, features=("window",), devices=("cuda",)), backend("cpu", features=("window",))
    )
    options = {"gpu": Options(interpret=True)}
    assert choose(registry, BackendChoice(options=options)).classes[0].chosen.name == "cpu"
    assert choose(registry, BackendChoice("gpu", options=options)).classes[0].chosen.name == "gpu"


def test_the_block_size_asked_for_counts():
    registry = registry_of(
        backend("big", rank=9, features=("window",), blocks=256), backend("small", features=("window",))
    )
    assert choose(registry).classes[0].chosen.name == "big"
    assert choose(registry, block_size=32).classes[0].chosen.name == "small"
    with pytest.raises(BackendUnsupportedError) as caught:
        choose(registry, BackendChoice("big"), block_size=32)
    assert (caught.value.field, caught.value.got) == ("cache.block_size", 32)
    assert "multiples of 256" in str(caught.value)


def test_packed_takes_the_next_block_first_layout():
    kv_first = nhd(KV, name="kv_first", order="field_first")
    both = registry_of(backend("a", features=("window",), layouts=[kv_first, hnd(KV)]))
    offer = choose(both, block_first_only=True).offers[FULL]
    assert [o.layout.name for o in offer.options] == ["hnd"]
    only = registry_of(backend("a", features=("window",), layouts=[kv_first]))
    with pytest.raises(BackendUnsupportedError, match="kv_first"):
        choose(only, BackendChoice("a"), block_first_only=True)


def test_a_reader_of_shared_bytes_has_a_say():
    registry = registry_of(backend("plain", rank=9), backend("capped", features=("softcap",)))
    owner, reader = CacheId(0), CacheId(5)
    caches = {owner: CACHES[FULL]}
    queries = {owner: query(), reader: query(softcap=30.0)}
    assert choose(registry, caches=caches, queries=queries).classes[0].chosen.name == "plain"
    row = choose(registry, caches=caches, queries=queries, shared={reader: owner}).classes[0]
    assert row.chosen.name == "capped"


def test_states_have_no_backend_and_contents_without_a_layout_say_so():
    state = KVCacheSpec(State(("s",), ((4,),), ("float32",)), Latest())
    latent = KVCacheSpec(Latent(512, 64), Full())
    caches = {CacheId(0): state, CacheId(1): latent}
    selection = choose(registry_of(backend("a")), caches=caches, queries={}, purpose="plan")
    assert [o.backend for o in selection.offers.values()] == [None, None]
    first, second = selection.classes
    assert (first.kind, first.candidates) == ("state", ())
    reason = second.candidates[0].verdict.reason
    assert (reason.field, reason.got) == ("content", "latent")


def test_a_hook_may_prefer_a_usable_backend_but_never_overrules_the_user():
    def prefer(kind, candidates):
        return candidates[-1]

    specs = (backend("a", rank=9, features=("window",)), backend("b", features=("window",)))
    registry = registry_of(*specs, kvcore_choose_backend=prefer)
    assert choose(registry).classes[0].chosen.name == "b"
    assert choose(registry, BackendChoice("a")).classes[0].chosen.name == "a"


def test_a_declaration_that_raises_is_unavailable_with_what_it_said():
    wrong = backend("wrong", rank=9)

    def fail(cls, asked, options):
        raise ZeroDivisionError("by zero")

    wrong.unsupported = classmethod(fail)
    row = choose(registry_of(wrong, backend("b", features=("window",)))).classes[0]
    assert statuses(row) == {"wrong": "unavailable", "b": "chosen"}
    assert "ZeroDivisionError: by zero" in row.candidates[0].verdict.reason.got


def test_a_layout_that_does_not_hold_the_content_is_no_layout():
    other = hnd(KVHeads(8, 64, dtype="float32"))
    row = choose(registry_of(backend("odd", rank=9, layouts=[other]), backend("b", features=("window",)))).classes[0]
    assert statuses(row) == {"odd": "unsupported", "b": "chosen"}
