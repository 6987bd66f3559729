"""Sphinx configuration. Builds offline; warnings are errors (`make docs`, `make test`)."""

from __future__ import annotations

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "kvcore"
author = "the kvcore authors"
copyright = "the kvcore authors, Apache-2.0"
release = installed_version("kvcore")

extensions = ["myst_parser", "generated_pages"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build", "_generated", "_ext", "decisions", "examples"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

html_theme = "furo"
html_title = f"kvcore {release}"
