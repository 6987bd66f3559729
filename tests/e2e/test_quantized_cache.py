"""Quantized caches in the main job: they run, say what they assume, and stay near float32."""

import logging
from dataclasses import replace

import pytest
import torch
from models.tiny import tiny_model
from support.engines import engine_settings

from kvcore.engine.llm import LLM
from kvcore.models.config_json import read_config
from kvcore.models.families import model_facts
from kvcore.registry.loader import installed
from kvcore.settings.cache import CacheSettings

TEXT = torch.randint(1, 250, (40,), generator=torch.Generator().manual_seed(0)).tolist()


def logits(path, dtype, scales, caplog):
    choice = CacheSettings(dtype=dtype, scales=scales)
    facts = model_facts(read_config(path), dtype="float32", cache=choice)
    settings = replace(engine_settings(path, max_model_len=64, num_blocks=40), facts=facts)
    caplog.clear()
    with caplog.at_level(logging.WARNING, logger="kvcore"):
        llm = LLM(settings, installed())
    return llm.score([TEXT], prompt_lens=[24])[0]


@pytest.mark.parametrize(
    ("dtype", "scales", "warned"),
    [("int8", "token_head", False), ("fp8_e4m3", "token_head", False), ("fp8_e4m3", "tensor", True)],
)
def test_logits_stay_near_and_unit_scales_are_named(dtype, scales, warned, tmp_path_factory, caplog):
    path = tiny_model("llama", tmp_path_factory.getbasetemp())
    plain = logits(path, "auto", None, caplog)
    coarse = logits(path, dtype, scales, caplog)
    assert ("1.0 is used" in caplog.text) == warned
    error = float((coarse - plain).norm() / plain.norm())
    assert 0 < error < (0.05 if dtype == "int8" else 0.2)
