"""Hydra's process-wide state, borrowed and given back: kvcore also works inside another Hydra application."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton
from hydra.version import VersionBase
from omegaconf import DictConfig

SCHEMA_NAME = "kvcore_schema"
# Hydra's state belongs to the process, so only one thread composes at a time.
_LOCK = threading.Lock()


@contextmanager
def hydra_session(conf: Path, schema: DictConfig) -> Iterator[None]:
    """Within it, `hydra.compose` reads `conf` and knows the schema; after it, all is as it was."""
    with _LOCK:
        GlobalHydra.instance()
        VersionBase.instance()
        theirs: tuple[type, ...] = (GlobalHydra, VersionBase)
        kept = {cls: Singleton._instances.pop(cls) for cls in theirs}
        store = ConfigStore.instance()
        before = store.repo.get(f"{SCHEMA_NAME}.yaml")
        store.store(SCHEMA_NAME, schema, provider="kvcore")
        try:
            with initialize_config_dir(str(conf), job_name="kvcore", version_base="1.3"):
                yield
        finally:
            Singleton._instances.update(kept)
            if before is None:
                store.repo.pop(f"{SCHEMA_NAME}.yaml", None)
            else:
                store.repo[f"{SCHEMA_NAME}.yaml"] = before
