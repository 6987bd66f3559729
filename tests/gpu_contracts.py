"""Prints the requirements of the extra `gpu-contracts`, for an install without their own requirements."""

from __future__ import annotations

import tomllib
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent / "pyproject.toml"

if __name__ == "__main__":
    print(*tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]["gpu-contracts"])
