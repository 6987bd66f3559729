"""Writes `tests/data/transformers_families.json`: every model type of transformers that makes text, and what it is.

Run it with a new transformers: `python tests/models/make_families.py`. The docs and a test tell from it which types are
planned: those whose text part has an adapter.
"""

import json
from pathlib import Path

import transformers
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

TABLE = Path(__file__).parents[1] / "data" / "transformers_families.json"
MAKES_TEXT = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
)
# What such a class must be given to be made.
NEEDED = {
    "gemma4_assistant": {
        "text_config": {"model_type": "gemma4_text", "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}
    }
}
OPEN = "decoder"


def family(name):
    """The model type of its text part, and what it is."""
    config = CONFIG_MAPPING[name](**NEEDED.get(name, {}))
    text = config.get_text_config(decoder=True).model_type or name
    if config.is_encoder_decoder or (name in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES and text == name):
        return text, "encoder and decoder"
    return text, "encoder" if text in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES else OPEN


def table():
    """All of them, by name."""
    types = sorted({name for mapping in MAKES_TEXT for name in mapping})
    return {"transformers": transformers.__version__, "types": {name: family(name) for name in types}}


def text(found):
    """As it is stored: a line a type."""
    rows = ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in found["types"].items())
    return f'{{\n  "transformers": {json.dumps(found["transformers"])},\n  "types": {{\n{rows}\n  }}\n}}\n'


if __name__ == "__main__":
    TABLE.write_text(text(table()))
