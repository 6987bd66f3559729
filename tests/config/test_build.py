"""From configuration to settings: the model's path and preset, devices, sizes and limits."""

import json
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcore.config import devices
from kvcore.config.build import build
from kvcore.config.compose import compose
from kvcore.config.schema import DeviceKeys
from kvcore.engine.planning import cpu_cache_bytes, prepare_plan
from kvcore.errors import CapacityError, ConfigError, KVCoreError, ModelError
from kvcore.registry.hookspecs import hookimpl
from kvcore.registry.loader import installed, load
from kvcore.registry.records import PluginSource
from kvcore.settings.units import parse_bytes

GiB = 1 << 30
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 128,
    "vocab_size": 256,
    "max_position_embeddings": 4096,
    "torch_dtype": "float16",
}


def settings_of(*overrides, purpose="plan"):
    return build(compose(overrides, installed()), installed(), purpose=purpose)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def test_the_default_preset_is_float32_on_a_cpu_and_the_checkpoints_type_elsewhere():
    cpu = settings_of("device=cpu")
    gpu = settings_of("device=h100-80gb")
    assert (cpu.settings.facts.dtype, gpu.settings.facts.dtype) == ("float32", "bfloat16")
    # 134,515,008 weights: embeddings 49152 x 576, 30 layers, final norm; output tied to the embeddings.
    layer = 576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536 + 2 * 576
    weights = 49152 * 576 + 30 * layer + 576
    assert cpu.settings.facts.weight_bytes == 4 * weights
    assert gpu.settings.facts.weight_bytes == 2 * weights
    assert (cpu.chat, cpu.model, cpu.settings.engine.max_model_len) == (True, "smollm2-135m", 8192)


def test_with_a_path_the_preset_no_longer_counts_but_keys_given_by_hand_do(model):
    built = settings_of(f"model.path={model}", "device=cpu")
    assert built.settings.facts.num_layers == 2
    assert built.settings.facts.dtype == "float16"  # not the preset's float32 on a CPU
    layer = 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64
    assert built.settings.facts.weight_bytes == 2 * (2 * 256 * 64 + 2 * layer + 64)
    assert (built.chat, built.model) == (False, "my-model")
    built = settings_of(f"model.path={model}/config.json", "model.weight_bytes=1MB", "chat=true", "device=cpu")
    assert (built.settings.facts.weight_bytes, built.chat, built.model) == (10**6, True, "my-model")


def test_paths_are_relative_to_the_callers_directory(model, monkeypatch):
    monkeypatch.chdir(model.parent)
    assert settings_of("model.path=my-model").settings.facts.num_layers == 2
    assert settings_of("model.path=./my-model/config.json").settings.facts.num_layers == 2
    with pytest.raises(ModelError) as caught:
        settings_of("model.path=elsewhere")
    assert caught.value.field == "model.path"


def test_lengths_beyond_the_models_own_are_planned_with_a_note_and_not_run():
    built = settings_of("engine.max_model_len=10000", "device=cpu")
    assert built.settings.engine.max_model_len == 10000
    assert any("8192" in note for note in built.notes)
    with pytest.raises(ConfigError) as caught:
        settings_of("engine.max_model_len=10000", "device=cpu", purpose="run")
    assert (caught.value.field, caught.value.got) == ("engine.max_model_len", 10000)


def test_a_preset_device_can_be_planned_but_not_run():
    facts = settings_of("device=l4-24gb").settings.device
    assert (facts.kind, facts.capability, facts.present) == ("cuda", (8, 9), False)
    amd = settings_of("device=mi300x-192gb").settings.device
    assert (amd.kind, amd.arch, amd.capability) == ("rocm", "gfx942", None)
    with pytest.raises(ConfigError) as caught:
        settings_of("device=l4-24gb", purpose="run")
    assert caught.value.field == "device"


@pytest.mark.parametrize(
    ("overrides", "kind", "field"),
    [
        (("cache.block_size=0",), ConfigError, "cache.block_size"),
        (("cache.block_size=-16",), ConfigError, "cache.block_size"),
        (("cache.block_size=big",), ConfigError, "cache.block_size"),
        (("cache.memory=0",), ConfigError, "cache.memory"),
        (("cache.memory=lots",), ConfigError, "cache.memory"),
        (("cache.memory=-1GiB",), ConfigError, "cache.memory"),
        (("model.weight_bytes=0",), ConfigError, "model.weight_bytes"),
        (("sampling.stop=['']",), ConfigError, "sampling.stop"),
        (("model.path=''",), ConfigError, "model.path"),
    ],
)
def test_bad_values_name_their_key(overrides, kind, field):
    with pytest.raises(KVCoreError) as caught:
        settings_of("device=cpu", *overrides)
    assert type(caught.value) is kind
    assert caught.value.field == field


def test_what_run_refuses_is_refused_before_anything_is_fetched(monkeypatch, tmp_path):
    monkeypatch.setenv("KVCORE_HOME", str(tmp_path))
    for overrides, kind in (
        (["cache.placement=packed", "cache.memory=1MiB"], CapacityError),
        (["cache.memory=1MiB"], CapacityError),
        (["backend=triton"], KVCoreError),
        (["cache.dtype=int4"], KVCoreError),
    ):
        with pytest.raises(kind):
            settings_of("device=cpu", *overrides, purpose="run")
    assert list(tmp_path.iterdir()) == []


def test_the_size_of_the_cache_by_default():
    assert cpu_cache_bytes(8 * GiB) == 2 * GiB
    assert cpu_cache_bytes(64 * GiB) == 4 * GiB
    settings = settings_of("device=a100-80gb", "cache.utilization=0.5").settings
    plan, _ = prepare_plan(settings, installed(), purpose="plan")
    (terms,) = plan.device
    assert (terms.total, terms.reserve, terms.weights) == (80 * GiB, 40 * GiB, 2 * 134_515_008)
    # 12 vectors of 576 a token of the step, logits of 256 requests in 16 and in 32 bits.
    assert terms.activations == 2048 * 12 * 576 * 2 + 256 * 49_152 * (2 + 4)
    # A row of 512 blocks, a count and a first block for each of 256 requests; the integers of a step.
    columns = 8192 // plan.configs[0].kv_cache_groups[0].kernel_block_size
    assert terms.tables == 4 * 256 * (columns + 2) + 8 * 2048 + 4 * (3 * 257 + 2 * 2048)
    assert sum(v for k, v in terms.as_dict().items() if k != "total") == terms.total
    assert terms.arena == plan.configs[0].total_bytes
    assert 0 <= terms.unused < plan.capacity.unit_bytes
    # A run measures what a plan allows for.
    first, _ = prepare_plan(
        replace(settings, device=replace(settings.device, present=True)), installed(), purpose="run"
    )
    assert (first.device[0].activations, first.device[0].graphs) == (0, 0)


def test_weights_that_fill_the_device_are_a_plan_that_does_not_fit():
    settings = settings_of("device=l4-24gb", "model.weight_bytes=24GiB").settings
    plan, _ = prepare_plan(settings, installed(), purpose="plan")
    assert not plan.fits
    assert plan.device[0].left < 0
    assert (plan.configs[0].num_blocks, plan.configs[0].total_bytes) == (0, 0)


def test_weights_that_nothing_tells_are_a_typed_error(model):
    bare = json.loads((model / "config.json").read_text())
    del bare["intermediate_size"]
    (model / "config.json").write_text(json.dumps(bare))
    settings = settings_of("device=l4-24gb", f"model.path={model}").settings
    with pytest.raises(ModelError) as caught:
        prepare_plan(settings, installed(), purpose="plan")
    assert caught.value.field == "intermediate_size"
    assert "model.weight_bytes" in caught.value.remedy


def test_a_plan_follows_from_settings_alone():
    plan, selection = prepare_plan(
        settings_of("device=cpu", "cache.num_blocks=513").settings, installed(), purpose="plan"
    )
    # 8192 tokens in blocks of 16 are 512 blocks, and one null block.
    assert plan.fits
    assert plan.as_dict()["bytes_per_token"] == 30 * 2 * 3 * 64 * 4
    assert selection.classes[0].chosen.name == "torch"
    smaller, _ = prepare_plan(settings_of("device=cpu", "cache.num_blocks=512").settings, installed(), purpose="plan")
    assert not smaller.fits


def test_an_adapter_for_a_type_that_is_taken_is_left_out_and_never_fatal(caplog):
    class Mine:
        model_types = ("llama",)

        def facts(self, config, *, dtype, cache):
            raise AssertionError("never asked")

    plugin = ModuleType("plugin")
    plugin.kvcore_model_adapters = hookimpl(lambda: [Mine])
    registry = load([PluginSource("mine", "acme-models", "3", lambda: plugin)])
    assert build(compose(["device=cpu"], registry), registry, purpose="plan").settings.facts.num_layers == 30
    assert "acme-models 3" in caplog.text
    assert "llama has an adapter already" in registry.plugins[0].reason


def test_a_preset_of_a_backend_sets_its_options_and_a_key_wins_over_it():
    options = compose(["backends/torch=kv_first", "backends/triton=interpreted"], installed()).config.backends
    assert (options["torch"].layout, options["triton"].interpret) == ("kv_first", True)
    options = compose(["backends/torch=kv_first", "backends.torch.layout=hnd"], installed()).config.backends
    assert options["torch"].layout == "hnd"


@given(st.integers(0, 10**6), st.sampled_from([("KiB", 2**10), ("mib", 2**20), ("GiB", 2**30), ("GB", 10**9), ("", 1)]))
def test_sizes_are_exact(count, unit):
    name, factor = unit
    assert parse_bytes("k", f"{count}{name}") == count * factor


def test_fractions_of_units_and_nonsense():
    assert parse_bytes("k", "0.1GiB") == 107374182  # floor of 107,374,182.4
    assert parse_bytes("k", "1.5 MiB") == 1572864
    for text in ("", "GiB", "1XB", "1e9", "-1", "1..2GiB", "nan", "0x10"):
        with pytest.raises(ConfigError):
            parse_bytes("k", text)


def test_the_driver_is_asked_only_where_torch_could_use_it(monkeypatch):
    monkeypatch.setattr(devices, "_torch_build", lambda: None)
    assert devices.device_facts(DeviceKeys(preset="auto")).kind == "cpu"
    with pytest.raises(ConfigError):
        devices.device_facts(DeviceKeys(preset="cuda"))
    assert devices.device_facts(DeviceKeys(preset="cpu")).memory_bytes == psutil.virtual_memory().total


def test_the_driver_tells_name_capability_and_memory(monkeypatch):
    """A stand-in for libcuda with the signatures of its header, called through ctypes' own types."""

    def put(kind_of, value):
        kind_of._obj.value = value
        return 0

    driver = SimpleNamespace(
        cuInit=lambda flags: 0,
        cuDeviceGetCount=lambda out: put(out, 1),
        cuDeviceGet=lambda out, index: put(out, 0),
        cuDeviceGetName=lambda buffer, size, device: setattr(buffer, "value", b"NVIDIA L4") or 0,
        cuDeviceTotalMem_v2=lambda out, device: put(out, 23 * GiB),
        cuDeviceGetAttribute=lambda out, attribute, device: put(out, {75: 8, 76: 9}[attribute]),
    )
    monkeypatch.setattr(devices, "_torch_build", lambda: "cuda")
    monkeypatch.setattr(devices.ctypes, "CDLL", lambda name: driver)
    facts = devices.device_facts(DeviceKeys(preset="auto"))
    assert (facts.kind, facts.name, facts.capability, facts.memory_bytes) == ("cuda", "NVIDIA L4", (8, 9), 23 * GiB)
    driver.cuInit = lambda flags: 100  # CUDA_ERROR_NO_DEVICE
    assert devices.device_facts(DeviceKeys(preset="auto")).kind == "cpu"


@pytest.mark.parametrize(
    ("overrides", "field"),
    [
        (["device.memory_bytes=1000"], "device.memory_bytes"),
        (["device=cpu", "device.kind=cuda"], "device.kind"),
        (["device.preset=h100-80gb"], "device.preset"),
        (["cache.eviction=nope"], "cache.eviction"),
        (["sampling.n=3", "engine.max_num_seqs=2"], "sampling.n"),
        (["sampling.top_p=0"], "sampling.top_p"),
    ],
)
def test_what_would_be_ignored_or_fail_late_is_refused_at_once(overrides, field):
    with pytest.raises(ConfigError) as caught:
        settings_of(*overrides)
    assert caught.value.field == field


def test_facts_of_a_described_device_can_be_changed():
    built = settings_of("device=h100-80gb", f"device.memory_bytes={40 * GiB}")
    assert built.settings.device.memory_bytes == 40 * GiB
