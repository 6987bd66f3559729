"""Real `config.json` files: 54 in the repository, and one of three megabytes where the data lie beside it."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from kvcore.cli.commands import command
from kvcore.config.build import build
from kvcore.config.compose import Composed, compose
from kvcore.engine.settings import EngineSettings
from kvcore.registry.loader import installed

HERE = Path(__file__).parents[1] / "data" / "hf_configs"
BESIDE = Path(__file__).parents[3] / "shared" / "data" / "hf_configs"
REAL = sorted({f.name: f for folder in (HERE, BESIDE) for f in folder.glob("*.json")}.values())


def model_name(file: Path) -> str:
    """The name of a config's model, ``org--model``."""
    return file.name.removesuffix("_config.json")


@cache
def composed(*words: str) -> Composed[Any]:
    """A configuration of `kvcore plan`, made once."""
    return compose(["model.path=config.json", *words], installed(), command("plan").root)


def settings_of(file: Path, *words: str) -> EngineSettings:
    """What `kvcore plan model.path=FILE WORDS` plans for."""
    made = composed(*words)
    config = replace(made.config, model=replace(made.config.model, path=str(file)))
    return build(replace(made, config=config), installed(), purpose="plan").settings
