"""Real configs on a real device, from the file alone: planned, or told on how many ranks; every term adds up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cache_facts import config_of, fact_files
from real_configs import HERE, REAL, model_name, settings_of

from kvcore.cli import main
from kvcore.engine.least_ranks import least_ranks
from kvcore.engine.planning import known_weights, prepare_plan
from kvcore.engine.settings import EngineSettings
from kvcore.errors import KVCoreError, ModelError
from kvcore.plan.planner import Plan
from kvcore.registry.loader import installed

# Its vision tower and its experts are of a kind that no formula describes.
REFUSED = {"moonshotai--Kimi-K3": "vision_config"}
# Ranks on one H200 with 141 GB, by hand: bytes of the stored weights over 126.4 GiB.
RANKS = {
    "meta-llama--Meta-Llama-3.1-8B": None,
    "meta-llama--Meta-Llama-3.1-70B": (2, 1),
    "deepseek-ai--DeepSeek-V3": (8, 1),
    "nvidia--DeepSeek-V3.1-NVFP4": (8, 2),
    "moonshotai--Kimi-K2-Instruct": (8, 2),
    "openai--gpt-oss-120b": None,
}


def planned(settings: EngineSettings) -> Plan:
    return prepare_plan(settings, installed(), purpose="plan")[0]


@pytest.mark.parametrize("file", REAL, ids=model_name)
def test_a_device_and_a_config_give_an_answer(file: Path) -> None:
    name = model_name(file)
    settings = settings_of(file, "device=h200-141gb")
    if name in REFUSED:
        with pytest.raises(ModelError) as caught:
            planned(settings)
        assert caught.value.field == REFUSED[name]
        assert "model.weight_bytes" in (caught.value.remedy or "")
        return
    plan = planned(settings)
    _check_terms(plan)
    assert len(plan.configs[0].kv_cache_groups) <= 8
    ranks = None if plan.fits else least_ranks(settings, installed())
    if name in RANKS:
        assert (None if ranks is None else (ranks.tensor, ranks.pipeline)) == RANKS[name]
    if plan.fits:
        return
    assert ranks is not None
    words = (f"parallel.tensor={ranks.tensor}", f"parallel.pipeline={ranks.pipeline}")
    more = planned(settings_of(file, "device=h200-141gb", *words))
    assert more.fits
    _check_terms(more)


def _check_terms(plan: Plan) -> None:
    for terms in plan.device:
        parts = terms.as_dict()
        assert sum(v for k, v in parts.items() if k != "total") == parts["total"]
        assert parts["weights"] > 0


def test_what_does_not_fit_is_status_1_with_the_ranks_that_help(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", f"model.path='{HERE / 'meta-llama--Meta-Llama-3.1-70B_config.json'}'", "device=h200-141gb"]
    assert main([*words, "output=json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["fits"], document["fits_with"]) == (False, {"parallel.tensor": 2, "parallel.pipeline": 1})
    assert document["weights"]["bytes"] == 2 * 70_553_706_496
    # The device has no more memory to give.
    assert document["remedies"] == []
    assert main(words) == 1
    assert "it fits with parallel.tensor=2" in capsys.readouterr().out


def test_every_fact_file_is_planned_with_the_bytes_of_a_cache(tmp_path: Path) -> None:
    """They hold cache geometry alone: with a device they name what is missing."""
    file, without_weights = tmp_path / "config.json", []
    for facts in fact_files():
        file.write_text(json.dumps(config_of(facts)))
        settings = settings_of(file, "cache.memory=64GiB", "device=h200-141gb")
        plan = planned(settings)
        assert plan.configs[0].total_bytes <= 64 << 30
        assert plan.capacity.longest() > 1000
        try:
            known_weights(settings)
        except KVCoreError as error:
            without_weights.append((facts["name"], error.remedy or ""))
    # Of the others the classes derive the widths from the model's own.
    assert len(without_weights) > 75
    assert not [name for name, remedy in without_weights if "model.weight_bytes" not in remedy]


def test_experts_are_said_to_be_shared_out_by_tensor_ranks_alone(capsys: pytest.CaptureFixture[str]) -> None:
    file = HERE / "Qwen--Qwen3-30B-A3B_config.json"
    assert main(["plan", f"model.path='{file}'", "device=h200-141gb", "output=json"]) == 0
    notes: list[Any] = json.loads(capsys.readouterr().out)["notes"]
    assert any("expert and data parallel are not planned" in str(note) for note in notes)
