"""Tiny random models of every architecture, made on the spot and kept for the session.

Weights are scaled up so that attention matters: with transformers' own initialization greedy tokens
barely notice that attention is gone. `tests/models/test_bridge_sensitivity.py` asserts that they do.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch

from .tiny_specs import DEFAULT_RUN, SPECS

__all__ = ["DEFAULT_RUN", "SPECS", "reference_model", "tiny_model"]

os.environ.setdefault("HF_HUB_OFFLINE", "1")
_made: dict[str, Path] = {}


def tiny_model(name: str, tmp_path: Path) -> Path:
    """A Hugging Face directory of the tiny model `name`, made once a session.

    Args:
        name: A key of `SPECS`.
        tmp_path: Where it is made the first time; any temporary directory that outlives the session's tests.
    """
    if name not in _made or not (_made[name] / "config.json").is_file():
        directory = Path(tmp_path) / f"tiny-{name}"
        _build(name, directory)
        _made[name] = directory
    return _made[name]


def reference_model(path: Path) -> torch.nn.Module:
    """transformers' own model of a directory, with its eager attention, in float32."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        str(path), dtype=torch.float32, attn_implementation="eager", local_files_only=True
    ).eval()


def _build(name: str, directory: Path) -> None:
    import transformers
    from transformers import AutoModelForCausalLM

    class_name, arguments = SPECS[name]
    config = getattr(transformers, class_name)(**arguments)
    torch.manual_seed(sum(name.encode()))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for label, parameter in model.named_parameters():
            _scale(label, parameter)
    model.save_pretrained(directory)
    # The same tests read the file as people write it: without what transformers adds on saving.
    file = directory / "config.json"
    saved = json.loads(file.read_text())
    saved.pop("transformers_version", None)
    file.write_text(json.dumps(saved, indent=1))


def _scale(label: str, parameter: torch.nn.Parameter) -> None:
    """Give matrices a gain above 1, sinks and biases a spread; norms and the state's own stay."""
    if label.endswith("sinks"):
        parameter.normal_(1.0, 0.7)
    elif any(part in label for part in ("A_log", "dt_bias", "conv1d", ".D")):
        return
    elif label.endswith("bias"):
        parameter.normal_(0.0, 0.1)
    elif parameter.ndim >= 2:
        fan_in = parameter.shape[-2] if parameter.ndim == 3 else parameter.shape[-1]
        gain = 2.0 if any(p in label for p in ("q_proj", "k_proj", "q_b_proj", "qkv", "query", "c_attn")) else 1.0
        parameter.normal_(0.0, gain * fan_in**-0.5)
