"""Spoilt configs: each gives a plan or a typed error within two seconds, never another exception."""

import copy
import json
import random
import time
from pathlib import Path

import pytest
from cache_facts import config_of, fact_files

from kvcore.cli import main
from kvcore.cli.plan import Keys, execute
from kvcore.cli.result import Job, to_json
from kvcore.config.compose import compose
from kvcore.errors import KVCoreError
from kvcore.models.config_json import read_config
from kvcore.registry.loader import installed

DATA = Path(__file__).parents[1] / "data"
SEED = 20_251_201
EXTREMES = [0, -1, 1, 2, 3, 7, 10_000, 10_001, 2**31, 2**63, 10**400, -(10**30), 0.0, 0.5, -1.5, 1e30, 1e308]
ODD = [
    float("nan"),
    float("inf"),
    True,
    False,
    None,
    "",
    "auto",
    "full_attention",
    "M*-E" * 5,
    [],
    {},
    [1],
    [None],
    {"x": {}},
]


def sources():
    """Real configs, and one small config for each model type of the tests."""
    real = [read_config(file) for file in sorted((DATA / "hf_configs").glob("*.json"))]
    return real + [config_of(facts) for facts in fact_files()]


def places(config, at=()):
    """Paths of all values."""
    items = config.items() if isinstance(config, dict) else enumerate(config[:100])
    for key, value in items:
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))


def mutate(config, others, draw):
    """One to three changes of a config."""
    config = copy.deepcopy(config)
    for _ in range(draw.randint(1, 3)):
        where = list(places(config))
        if not where:
            return config
        *way, last = draw.choice(where)
        parent = config
        for key in way:
            parent = parent[key]
        change = draw.choice(["drop", "extreme", "odd", "type", "list", "nest", "swap"])
        if change == "drop":
            del parent[last]
        elif change == "extreme":
            parent[last] = draw.choice(EXTREMES)
        elif change == "odd":
            parent[last] = copy.deepcopy(draw.choice(ODD))
        elif change == "type":
            config["model_type"] = draw.choice(others).get("model_type", {})
        elif change == "list" and isinstance(parent[last], list):
            parent[last] = draw.choice([parent[last][1:], parent[last] * 2, parent[last][::-1], [draw.choice(ODD)]])
        elif change == "nest":
            config = {
                "model_type": draw.choice(others).get("model_type"),
                draw.choice(["text_config", "decoder"]): config,
            }
        else:
            config.update(copy.deepcopy(draw.choice(others)))
    return config


def check(count, folder):
    """Plan `count` mutants through the function behind `kvcore plan`."""
    draw, known = random.Random(SEED), sources()
    file, outcomes = folder / "config.json", []
    file.write_text("{}")
    job = Job(compose([f"model.path='{file}'", "cache.memory=64MiB", "device=cpu"], installed(), Keys), installed())
    for number in range(count):
        config = mutate(draw.choice(known), known, draw)
        file.write_text(json.dumps(config))
        began = time.perf_counter()
        try:
            text = to_json(execute(job).document)
            outcomes.append("plan")
        except KVCoreError as error:
            text = f"{to_json(error.as_dict())} {error}"
            outcomes.append("refused")
        except Exception as error:
            raise AssertionError(f"mutant {number}: {json.dumps(config)[:4000]}") from error
        assert text
        assert time.perf_counter() - began < 2, f"mutant {number}: {json.dumps(config)[:4000]}"
    # Both happen often, or the mutants would show nothing.
    assert min(outcomes.count("plan"), outcomes.count("refused")) > count / 10


def test_mutants(tmp_path):
    check(300, tmp_path)


@pytest.mark.long
def test_many_mutants(tmp_path):
    check(3_000, tmp_path)


@pytest.mark.parametrize(
    "text",
    [
        '{"model_type": {}}',
        '{"model_type": "llama", "x": ' + "9" * 4301 + "}",
        '{"model_type": "llama", "num_hidden_layers": NaN}',
        '{"model_type": "llama", "num_hidden_layers": ' + "[" * 900 + "]" * 900 + "}",
        '{"model_type": "mistral3", "text_config": {"model_type": "mistral4"}}',
        "[]",
        "\ud83d",
    ],
)
def test_bad_input_is_status_2_by_the_command_line(text, tmp_path, capsys):
    file = tmp_path / "config.json"
    file.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert main(["plan", f"model.path='{file}'", "cache.memory=64MiB", "device=cpu", "output=json"]) == 2
    assert json.loads(capsys.readouterr().out)["error"]["message"]
