"""Hydra's process-wide state, borrowed and given back: kvcore also works inside another Hydra application."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.version import VersionBase
from omegaconf import DictConfig

SCHEMA_NAME, ROOT_NAME = "kvcore_schema", "kvcore_root"
# Hydra's state belongs to the process, so only one thread composes at a time.
_LOCK = threading.Lock()


@contextmanager
def hydra_session(conf: Path, schema: DictConfig, defaults: Sequence[Any], folders: Sequence[Path]) -> Iterator[None]:
    """Within it, ``hydra.compose(ROOT_NAME)`` reads `conf`, then `folders`; after it, all is as it was."""
    root = {"defaults": list(defaults), "hydra": {"searchpath": [f"file://{folder}" for folder in folders]}}
    with _LOCK:
        GlobalHydra.instance()
        VersionBase.instance()
        theirs: tuple[type, ...] = (GlobalHydra, VersionBase)
        kept = {cls: Singleton._instances.pop(cls) for cls in theirs}
        repo = ConfigStore.instance().repo
        names = {SCHEMA_NAME: schema, ROOT_NAME: root}
        before = {name: repo.get(f"{name}.yaml") for name in names}
        for name, content in names.items():
            ConfigStore.instance().store(name, content, provider="kvcore")
        try:
            with initialize_config_dir(str(conf), job_name="kvcore", version_base="1.3"):
                yield
        finally:
            Singleton._instances.update(kept)
            for name, stored in before.items():
                if stored is None:
                    repo.pop(f"{name}.yaml", None)
                else:
                    repo[f"{name}.yaml"] = stored
