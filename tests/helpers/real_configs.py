"""Real `config.json` files: 54 in the repository, and one of three megabytes where the data lie beside it."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parents[1] / "data" / "hf_configs"
BESIDE = Path(__file__).parents[3] / "shared" / "data" / "hf_configs"
REAL = sorted({f.name: f for folder in (HERE, BESIDE) for f in folder.glob("*.json")}.values())


def model_name(file: Path) -> str:
    """The name of a config's model, ``org--model``."""
    return file.name.removesuffix("_config.json")
