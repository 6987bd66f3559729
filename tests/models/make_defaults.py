"""Writes `kvcore/models/defaults.json`: what transformers' config classes hold where a field is absent.

Run it with a new transformers: `python tests/models/make_defaults.py`. A field enters the table when a text
literal in `kvcore/models` names it and the class has it, so a field that is read later is found by the tests.
"""

import ast
import json
from dataclasses import MISSING, fields
from functools import cache
from pathlib import Path

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvcore.models.families import BUILT_IN

MODELS = Path(__file__).parents[2] / "kvcore" / "models"
TABLE = MODELS / "defaults.json"
# Read by kvcore, and not in the table on purpose.
LEFT_OUT = {
    "architectures": "a name for people; no class has a default",
    "dtype": "no class has a default; the checkpoint's tensors would tell, which planning does not open",
    "eos_token_id": "the ids that end a text come from the checkpoint's files alone, never from a class",
    "text_config": "its defaults are those of its own model type",
    "vision_config": "only its presence is read",
    "audio_config": "only its presence is read",
    "model_type": "it chooses the row",
    "is_encoder_decoder": "false but for Whisper, whose adapter refuses to run whatever it says",
}
# Model types of ours without a class in transformers 5.24: their fields have no default.
NO_CLASS = {
    "internlm2": "code from the checkpoint",
    "minicpm": "code from the checkpoint",
    "baichuan": "code from the checkpoint",
    "minimax_m3": "code from the checkpoint; transformers knows minimax_m3_vl",
    "kimi_k2": "code from the checkpoint, with deepseek_v3's class",
    "kimi_k3": "code from the checkpoint",
    "deepseek_ref": "deepseek_v4 under another name",
}


@cache
def literals():
    """Every text literal of the code that reads configs: a superset of the fields that are read."""
    files = [*(f for room in ("families", "parameters") for f in sorted((MODELS / room).glob("*.py")))]
    files += [MODELS / "config_json.py", MODELS / "rope.py"]
    trees = [ast.parse(file.read_text()) for file in files]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return {n.value for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)} - set(LEFT_OUT)


def class_defaults(kind):
    """A class's own defaults of the fields that are read, before it derives one from another."""
    read = literals()
    found = {}
    for field in fields(kind):
        if field.name in read:
            value = field.default if field.default_factory is MISSING else field.default_factory()
            found[field.name] = value
    return {name: list(v) if isinstance(v, tuple) else v for name, v in found.items() if is_plain(v)}


def is_plain(value):
    try:
        json.dumps(value)
    except TypeError:
        return False
    return value is not MISSING


def takes_null(kind, name):
    """Whether the class accepts a written null."""
    (hint,) = (field.type for field in fields(kind) if field.name == name)
    return "None" in (hint if isinstance(hint, str) else str(hint))


def needs_whole_heads(kind):
    """Whether the class refuses a width that is no multiple of the number of heads, a head dimension given."""
    known = {f.name for f in fields(kind)} | set(kind.attribute_map)
    odd = {"hidden_size": 35, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8}
    try:
        kind(**{name: value for name, value in odd.items() if name in known})
    except Exception as error:
        return "multiple" in str(error) or "divisible" in str(error)
    return False


def row(name):
    """One model type: a class of text fields, or an outer class that names its text part's type."""
    kind = CONFIG_MAPPING[name]
    text = kind().get_text_config(decoder=True)
    if type(text) is not kind and not kind().is_encoder_decoder:
        # An absent text part can have other values than an empty one.
        inner = class_defaults(type(text))
        absent, empty = text.to_dict(), type(text)().to_dict()
        derived = ("layer_types", "rope_parameters")
        unlike = any(absent.get(f) != empty.get(f) for f in inner)
        part = {f: absent[f] for f in inner if f in absent and f not in derived and absent[f] != inner[f]}
        part = part if unlike else {}
        part_type = type(kind(text_config={}).get_text_config(decoder=True)).model_type
        return {"text_type": part_type, "text_config": part}
    values = class_defaults(kind)
    aliases = {new: old for new, old in kind.attribute_map.items() if new in literals()}
    nullable = sorted(f for f, v in values.items() if v is not None and takes_null(kind, f))
    rope = getattr(kind(), "rope_parameters", None) or {}
    if rope.get("rope_type", "default") != "default":
        values["rope_parameters"] = rope  # the class sets it where it is absent
    return {"values": values, "aliases": aliases, "nullable": nullable, "whole_heads": needs_whole_heads(kind)}


def table():
    names = {name for adapter in BUILT_IN for name in adapter.model_types} - set(NO_CLASS)
    rows = {name: row(name) for name in sorted(names)}
    for inner in sorted({r["text_type"] for r in rows.values() if "text_type" in r} - set(rows)):
        rows[inner] = row(inner)
    return {"transformers": transformers.__version__, "types": rows}


def text(content):
    """The file: a field a line would be long, a file a line unreadable; so a model type a line."""
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(row)}" for name, row in content["types"].items())
    return f'{{"transformers": "{content["transformers"]}", "types": {{\n{lines}\n}}}}\n'


if __name__ == "__main__":
    TABLE.write_text(text(table()))
