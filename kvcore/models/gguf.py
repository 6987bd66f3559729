"""From a GGUF file to a Hugging Face directory, by transformers' own reader; done once for the default model.

Weights are stored in float32: a Q4_1 value is ``d * q + m`` with float16 d and m and a 4-bit q, which
neither float16 nor bfloat16 can hold.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from kvcore.errors import ModelError

Progress = Callable[[str, float], None]
# transformers reads more kinds of files, but not how a vocabulary splits text before it merges
# (tokenizer.ggml.pre): tokens of another kind would be wrong without a word.
READABLE = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}


def convert(source: Path, directory: Path, progress: Progress) -> None:
    """Write a Hugging Face directory from a GGUF file.

    Args:
        source: The GGUF file.
        directory: An empty or missing directory.
        progress: Called with what is done and the fraction of it.

    Raises:
        ModelError: It is no GGUF file, or of a kind whose tokens transformers would get wrong.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _check_kind(source)
    folder, options = str(source.parent), {"gguf_file": source.name, "local_files_only": True}
    progress("converting weights", 0.0)
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, **options
        )
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise ModelError(f"transformers cannot read {source.name}: {error}", field="gguf", got=source.name) from error
    wrong = {kind: sorted(names) for kind, names in info.items() if names}
    if wrong:  # transformers would leave what is missing at random values
        raise ModelError(f"{source.name} is no whole model", field="gguf", got=wrong, allowed="every tensor of a Llama")
    progress("converting weights", 0.8)
    directory.mkdir(parents=True, exist_ok=True)
    del model.config.quantization_config  # it speaks of the file; the weights are plain now
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(directory)
    model.generation_config.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    weights = model.state_dict()
    if model.config.tie_word_embeddings:  # one matrix, under the name that every reader looks for
        del weights["lm_head.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    progress("converting weights", 1.0)


def _check_kind(source: Path) -> None:
    from gguf import GGUFReader

    try:
        fields = GGUFReader(str(source)).fields
    except (OSError, ValueError, KeyError, IndexError) as error:
        raise ModelError(f"{source.name} is no GGUF file: {error}", field="gguf", got=source.name) from error
    for key, allowed in READABLE.items():
        got = fields[key].contents() if key in fields else None
        if got != allowed:
            raise ModelError(f"the converter does not know this {key}", field=key, got=got, allowed=allowed)
