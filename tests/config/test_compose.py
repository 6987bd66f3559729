"""Overrides to configuration: typed nodes of plugins, refusals, presets, and Hydra's state given back."""

from dataclasses import dataclass, field
from types import ModuleType

import pytest
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra

from kvcore.attention.declaration import BackendSpec
from kvcore.config.compose import compose
from kvcore.config.home import conf_dir, presets
from kvcore.config.keys import all_keys
from kvcore.config.overrides import parse
from kvcore.config.sweep import expand
from kvcore.errors import ConfigError, KVCoreError, NotBuiltError, PluginError, UnknownBackendError, UnknownKeyError
from kvcore.registry.hookspecs import hookimpl
from kvcore.registry.loader import installed, load
from kvcore.registry.records import PluginSource


@dataclass(frozen=True)
class Inner:
    depth: int = 1


@dataclass(frozen=True)
class Config:
    num_splits: int = 4
    layout: str = "auto"
    ratio: float | None = None
    inner: Inner = field(default_factory=Inner)

    def __post_init__(self):
        if self.layout not in ("auto", "hnd"):
            raise ConfigError("unknown layout", field="backends.acme.layout", got=self.layout, allowed="hnd")


@dataclass
class Odd:
    thing: object = ...


def backend(called, options):
    functions = {
        n: classmethod(lambda cls, *a: None)
        for n in ("unavailable", "unsupported_device", "unsupported", "layouts", "create")
    }
    return type("Spec", (BackendSpec,), {"name": called, "Config": options, **functions})


def registry_of(*specs, broken=False):
    plugin = ModuleType("plugin")
    plugin.kvcore_backends = hookimpl(lambda: specs)
    sources = [PluginSource("p", "acme-attn", "1", lambda: plugin)]
    if broken:

        def fail():
            raise ImportError("no libgpu.so")

        sources.append(PluginSource("gpu", "acme-gpu", "7", fail))
    return load(sources)


ACME = registry_of(backend("acme", Config), broken=True)


def test_defaults_need_no_override():
    config = compose([], ACME).config
    assert (config.cache.block_size, config.engine.max_num_seqs, config.sampling.max_tokens) == ("auto", 256, 64)
    assert config.model.geometry["num_hidden_layers"] == 30
    assert config.device.preset == "auto"


def test_options_of_a_third_party_are_typed_without_any_yaml():
    options = compose(["backends.acme.num_splits=8", "backends.acme.inner.depth=3"], ACME).config.backends["acme"]
    assert options == Config(num_splits=8, inner=Inner(3))
    with pytest.raises(ConfigError) as caught:
        compose(["backends.acme.num_splits=many"], ACME)
    assert (caught.value.field, caught.value.allowed) == ("backends.acme.num_splits", "int")
    with pytest.raises(ConfigError, match="unknown layout"):
        compose(["backends.acme.layout=zigzag"], ACME)


def test_a_config_that_is_no_node_puts_its_backend_out_of_service():
    registry = registry_of(backend("fine", Config), backend("odd", Odd))
    compose([], registry)
    assert sorted(registry.backends) == ["fine"]
    with pytest.raises(PluginError, match="cannot be a typed node"):
        registry.backend("odd")


@pytest.mark.parametrize(
    ("override", "kind", "field"),
    [
        ("cache.blok_size=16", UnknownKeyError, "cache.blok_size"),
        ("+cache.more=1", UnknownKeyError, "cache.more"),
        ("++cache.block_size=16", UnknownKeyError, "cache.block_size"),
        ("~cache", UnknownKeyError, "cache"),
        ("cache={block_size: 16}", UnknownKeyError, "cache"),
        ("hydra.run.dir=out", UnknownKeyError, "hydra.run.dir"),
        ("model@x=smollm2-135m", UnknownKeyError, "model"),
        ("words", ConfigError, "override"),
        ("=1", UnknownKeyError, ""),
        (7, ConfigError, "override"),
        ("model.path=a=b", ConfigError, "model.path"),
        ("model=llama", ConfigError, "model"),
        ("device=toaster", ConfigError, "device"),
        ("backends/acme=fast", ConfigError, "backends/acme"),
        ("cache.block_size=16,32", ConfigError, "cache.block_size"),
        ("cache.num_blocks=0", ConfigError, "cache.num_blocks"),
        ("cache.num_blocks=-3", ConfigError, "cache.num_blocks"),
        ("cache.num_blocks=x", ConfigError, "cache.num_blocks"),
        ("cache.utilization=1.5", ConfigError, "cache.utilization"),
        ("engine.max_model_len=0", ConfigError, "engine.max_model_len"),
        ("engine.max_num_seqs=0", ConfigError, "engine.max_num_seqs"),
        ("engine.max_num_batched_tokens=-1", ConfigError, "engine.max_num_batched_tokens"),
        ("sampling.temperature=nan", ConfigError, "sampling.temperature"),
        ("sampling.top_p=2", ConfigError, "sampling.top_p"),
        ("sampling.max_tokens=0", ConfigError, "sampling.max_tokens"),
        ("sampling.n=0", ConfigError, "sampling.n"),
        ("sampling.stop=word", ConfigError, "sampling.stop"),
        ("cache.salt=${nowhere}", ConfigError, "cache.salt"),
        ("cache.placement=somewhere", ConfigError, "cache.placement"),
        ("cache.dtype=float8", ConfigError, "cache.dtype"),
        ("cache.hash=md5", ConfigError, "cache.hash"),
        ("output=xml", ConfigError, "output"),
        ("chat=maybe", ConfigError, "chat"),
        ("executor=threads", NotBuiltError, "executor"),
        ("parallel.tensor=0", ConfigError, "parallel.tensor"),
        ("parallel.pipeline=9999", ConfigError, "parallel.pipeline"),
        ("parallel.decode_context=x", ConfigError, "parallel.decode_context"),
        ("executor=process", NotBuiltError, "executor"),
        ("executor=ray", NotBuiltError, "executor"),
        ("cache.swap_memory=1GiB", NotBuiltError, "cache.swap_memory"),
        ("plan.accounting=vllm", UnknownKeyError, "plan.accounting"),
        ("format=svg", UnknownKeyError, "format"),
        ("backend=nope", UnknownBackendError, "backend"),
        ("backend_by_kind.window=nope", UnknownBackendError, "backend_by_kind.window"),
        ("backends.nope.x=1", UnknownBackendError, "backends.nope"),
        ("backends/nope=x", UnknownBackendError, "backends/nope"),
        ("backends.acme.splits=1", UnknownKeyError, "backends.acme.splits"),
        ("plugins.nope.x=1", UnknownKeyError, "plugins.nope.x"),
    ],
)
def test_every_bad_override_is_a_typed_error_that_names_its_key(override, kind, field):
    with pytest.raises(KVCoreError) as caught:
        compose([override], ACME)
    assert type(caught.value) is kind
    assert caught.value.field == field
    assert caught.value.got is not None


def test_an_unknown_backend_lists_the_installed_and_why_others_are_broken():
    with pytest.raises(UnknownBackendError) as caught:
        compose(["backend=gpu"], ACME)
    assert caught.value.allowed == ["acme"]
    assert "acme-gpu 7" in str(caught.value)
    assert "no libgpu.so" in str(caught.value)


def test_an_unknown_key_lists_what_is_near():
    with pytest.raises(UnknownKeyError) as caught:
        compose(["cache.blok_size=16"], ACME)
    assert "cache.block_size" in caught.value.allowed


def test_the_size_of_the_cache_is_given_once():
    with pytest.raises(ConfigError, match="twice"):
        compose(["cache.memory=1GiB", "cache.num_blocks=8"], ACME)


def test_quoted_values_keep_their_signs():
    assert compose(["model.path='a=b,c'"], ACME).config.model.path == "a=b,c"
    assert compose(["sampling.stop=['a,b', c]"], ACME).config.sampling.stop == ("a,b", "c")


def test_every_preset_composes_and_every_backend_folder_is_reachable():
    for name in presets("device"):
        assert compose([f"device={name}"], ACME).config.device.preset == name
    for name in presets("model"):
        assert compose([f"model={name}"], ACME).config.model.name == name
    for folder in (conf_dir() / "backends").glob("*/"):
        assert folder.name in installed().backends


def test_keys_are_listed_with_type_default_and_help():
    keys = {k.path: k for k in all_keys(ACME)}
    assert (keys["backends.acme.inner.depth"].type, keys["backends.acme.inner.depth"].default) == ("int", 1)
    assert keys["cache.placement"].choices == ("auto", "slots", "packed")
    assert all(k.help for p, k in keys.items() if not p.startswith("backends."))


def test_sweeps_expand_with_hydras_grammar():
    assert expand(["a=1,2", "b=x", "c=range(0,2)"]) == [
        ["a=1", "b=x", "c=0"],
        ["a=1", "b=x", "c=1"],
        ["a=2", "b=x", "c=0"],
        ["a=2", "b=x", "c=1"],
    ]
    ((first,), (second,)) = expand(["a=choice('x,y',z)"])
    assert [parse([text])[0].value() for text in (first, second)] == ["x,y", "z"]
    assert expand([]) == [[]]
    for bad in ("a=glob(*)", "a=interval(0,1)", "a=range(0,10000000)"):
        with pytest.raises(ConfigError):
            expand([bad])


def test_composing_inside_another_hydra_application_leaves_no_trace(tmp_path):
    (tmp_path / "app.yaml").write_text("cache: theirs\n")
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(tmp_path), version_base="1.2", job_name="theirs"):
        ours, theirs = GlobalHydra.instance(), GlobalHydra.instance().hydra
        stored = sorted(ConfigStore.instance().repo)
        assert compose(["cache.block_size=32"], ACME).config.cache.block_size == 32
        with pytest.raises(ConfigError):
            compose(["cache.num_blocks=x"], ACME)
        assert GlobalHydra.instance() is ours
        assert ours.hydra is theirs
        assert sorted(ConfigStore.instance().repo) == stored
        assert hydra_compose("app").cache == "theirs"


def test_composing_alone_leaves_hydra_uninitialized():
    GlobalHydra.instance().clear()
    compose([], ACME)
    assert not GlobalHydra.instance().is_initialized()
