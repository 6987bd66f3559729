"""From a GGUF file to a Hugging Face directory: weights, config, tokenizer. No torch, no transformers.

Weights are stored in float32: a Q4_1 value is ``d * q + m`` with float16 d and m and a 4-bit q, which
neither float16 nor bfloat16 can hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvcore.errors import ModelError

Progress = Callable[[str, float], None]
Array = npt.NDArray[np.float32]
# llama.cpp's names of a block's tensors, and transformers' names in a Llama layer.
BLOCK_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
READABLE = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm"}
CONTROL = 3  # token type of llama.cpp: special, never produced by merging text


class GgufFile:
    """A GGUF file of architecture ``llama`` with a byte-level BPE vocabulary.

    Args:
        path: The file.

    Raises:
        ModelError: It is no GGUF file, or of another architecture or vocabulary.
    """

    def __init__(self, path: Path) -> None:
        from gguf import GGUFReader

        try:
            self.reader = GGUFReader(str(path))
        except (OSError, ValueError, KeyError, IndexError) as error:
            raise ModelError(f"{path.name} is no GGUF file: {error}", field="gguf", got=path.name) from error
        for key, allowed in READABLE.items():
            if self.field(key) != allowed:
                raise ModelError(
                    f"the converter does not know this {key}", field=key, got=self.field(key), allowed=allowed
                )

    def field(self, key: str, default: Any = None) -> Any:
        """One metadata value."""
        entry = self.reader.fields.get(key)
        return default if entry is None else entry.contents()

    def need(self, key: str) -> Any:
        """One metadata value that must be there."""
        value = self.field(key)
        if value is None:
            raise ModelError(f"the GGUF file lacks {key}", field=key, got=None)
        return value

    def config(self) -> dict[str, Any]:
        """`config.json`."""
        heads = int(self.need("llama.attention.head_count"))
        hidden = int(self.need("llama.embedding_length"))
        names = {t.name for t in self.reader.tensors}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": int(self.need("llama.block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.field("llama.attention.head_count_kv", heads)),
            "head_dim": int(self.field("llama.attention.key_length", hidden // heads)),
            "intermediate_size": int(self.need("llama.feed_forward_length")),
            "max_position_embeddings": int(self.need("llama.context_length")),
            "vocab_size": len(self.need("tokenizer.ggml.tokens")),
            "rms_norm_eps": _shortest(self.need("llama.attention.layer_norm_rms_epsilon")),
            "rope_theta": _shortest(self.field("llama.rope.freq_base", 10000.0)),
            "hidden_act": "silu",
            "tie_word_embeddings": "output.weight" not in names,
            "torch_dtype": "float32",
            **self.token_ids(),
        }

    def token_ids(self) -> dict[str, int]:
        """`bos_token_id`, `eos_token_id`, `pad_token_id` as far as the file names them."""
        keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
        found = {f"{k}_token_id": self.field(f"tokenizer.ggml.{v}_token_id") for k, v in keys.items()}
        return {k: int(v) for k, v in found.items() if v is not None}

    def tokenizer(self) -> dict[str, Any]:
        """`tokenizer.json`: byte-level BPE that splits off every digit."""
        tokens: list[str] = self.need("tokenizer.ggml.tokens")
        types: list[int] = self.need("tokenizer.ggml.token_type")
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
        return {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": i, "content": text, **flags}
                for i, (text, kind) in enumerate(zip(tokens, types, strict=True))
                if kind == CONTROL
            ],
            "normalizer": None,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level],
            },
            "post_processor": None,
            "decoder": {**byte_level, "add_prefix_space": True},
            "model": {
                "type": "BPE",
                "dropout": None,
                "unk_token": None,
                "continuing_subword_prefix": None,
                "end_of_word_suffix": None,
                "fuse_unk": False,
                "byte_fallback": False,
                "vocab": {text: i for i, text in enumerate(tokens)},
                "merges": [merge.split(" ") for merge in self.need("tokenizer.ggml.merges")],
            },
        }

    def tokenizer_config(self) -> dict[str, Any]:
        """`tokenizer_config.json`: special tokens and the chat template."""
        tokens: list[str] = self.need("tokenizer.ggml.tokens")
        ids = {k.removesuffix("_id"): tokens[v] for k, v in self.token_ids().items()}
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(self.need("llama.context_length")),
            **ids,
        }
        template = self.field("tokenizer.chat_template")
        return config if template is None else {**config, "chat_template": template}

    def weights(self, progress: Progress) -> dict[str, Array]:
        """All tensors in float32, under transformers' names."""
        from gguf import dequantize

        config, found = self.config(), {}
        heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
        total = len(self.reader.tensors)
        for done, tensor in enumerate(self.reader.tensors):
            value: Array = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
            parts = tensor.name.split(".")
            if parts[0] == "blk" and parts[2] in heads:
                value = pair_halves(value, heads[parts[2]])
            found[_name(parts)] = np.ascontiguousarray(value)
            progress("converting weights", done / total)
        return found


def _name(parts: list[str]) -> str:
    if parts[0] in TOP_NAMES and len(parts) == 2:
        return f"{TOP_NAMES[parts[0]]}.{parts[1]}"
    if parts[0] == "blk" and len(parts) == 4 and parts[2] in BLOCK_NAMES:
        return f"model.layers.{parts[1]}.{BLOCK_NAMES[parts[2]]}.{parts[3]}"
    raise ModelError("the GGUF file has a tensor that no Llama has", field="tensor", got=".".join(parts))


def pair_halves(weight_OI: Array, heads: int) -> Array:
    """Rows of each head from llama.cpp's order to transformers'.

    Rotary embedding turns pairs of rows: llama.cpp lays a pair side by side (0, 1), (2, 3), ...;
    transformers pairs row i with row i + D / 2.
    """
    rows, columns = weight_OI.shape
    pairs = weight_OI.reshape(heads, rows // heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def convert(source: Path, directory: Path, progress: Progress) -> None:
    """Write a Hugging Face directory from a GGUF file.

    Args:
        source: The GGUF file.
        directory: An empty or missing directory.
        progress: Called with what is done and the fraction of it.

    Raises:
        ModelError: The file is not of a kind that the converter knows.
    """
    from safetensors.numpy import save_file

    file = GgufFile(source)
    directory.mkdir(parents=True, exist_ok=True)
    documents: Mapping[str, Any] = {
        "config.json": file.config(),
        "generation_config.json": file.token_ids(),
        "tokenizer.json": file.tokenizer(),
        "tokenizer_config.json": file.tokenizer_config(),
    }
    for name, document in documents.items():
        (directory / name).write_text(json.dumps(document, ensure_ascii=False, indent=1), encoding="utf-8")
    save_file(file.weights(progress), directory / "model.safetensors", metadata={"format": "pt"})
    progress("converting weights", 1.0)
