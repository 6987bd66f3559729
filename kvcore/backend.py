"""What a plugin is written against: a backend, a content, a retention, a model adapter, a policy, an observer.

Import from here and from `kvcore.testing`; every other module is internal and may change. Names are imported when they
are first used, so a declaration that takes none of the torch part loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcore.attention.backend import AttentionBackend, AttentionGroup, AttentionLayer
    from kvcore.attention.batch import Batch, GroupBatch
    from kvcore.attention.declaration import API_VERSION, BackendSpec, DeviceFacts, NoOptions
    from kvcore.attention.device import gpu_facts
    from kvcore.attention.query import AttentionQuery, Capabilities, Feature, Mask
    from kvcore.errors import (
        BackendUnavailableError,
        BackendUnsupportedError,
        ConfigError,
        IntegrityError,
        KVCoreError,
        LayoutError,
        ModelError,
        NotBuiltError,
        Refusal,
    )
    from kvcore.manage.policies.eviction import EvictionPolicy
    from kvcore.manage.watch.events import Cleared, Event, Removed, Stored
    from kvcore.memory.dtypes import torch_dtype
    from kvcore.memory.kernels.cache_write import write_tokens
    from kvcore.memory.kernels.launch import Launcher
    from kvcore.memory.slot_writer import SlotWriter
    from kvcore.memory.staging import StagingBuffer
    from kvcore.models.config_json import Fields
    from kvcore.models.facts import CacheFacts, LengthRefusal, ModelAdapter, ModelFacts
    from kvcore.models.families.base import FamilyAdapter
    from kvcore.models.home import kvcore_home
    from kvcore.models.parts import CachePart, Heads, LatentHeads, Recurrent
    from kvcore.registry.hookspecs import hookimpl
    from kvcore.registry.signatures import require_parameters
    from kvcore.settings.cache import CacheSettings
    from kvcore.spec.cache_spec import CacheId, KVCacheSpec
    from kvcore.spec.content import Content, KVHeads, Latent, LogicalField, Quant, State
    from kvcore.spec.dtypes import ceil_div, dtype
    from kvcore.spec.layout import (
        TOKEN,
        Axis,
        KernelBlocks,
        LayoutField,
        LayoutOption,
        PageLayout,
        SizedLayout,
        hnd,
        nhd,
    )
    from kvcore.spec.retention import Chunk, Encoder, Full, Latest, Retention, Window, touched_blocks

__all__ = [
    "API_VERSION",
    "TOKEN",
    "AttentionBackend",
    "AttentionGroup",
    "AttentionLayer",
    "AttentionQuery",
    "Axis",
    "BackendSpec",
    "BackendUnavailableError",
    "BackendUnsupportedError",
    "Batch",
    "CacheFacts",
    "CacheId",
    "CachePart",
    "CacheSettings",
    "Capabilities",
    "Chunk",
    "Cleared",
    "ConfigError",
    "Content",
    "DeviceFacts",
    "Encoder",
    "Event",
    "EvictionPolicy",
    "FamilyAdapter",
    "Feature",
    "Fields",
    "Full",
    "GroupBatch",
    "Heads",
    "IntegrityError",
    "KVCacheSpec",
    "KVCoreError",
    "KVHeads",
    "KernelBlocks",
    "Latent",
    "LatentHeads",
    "Latest",
    "Launcher",
    "LayoutError",
    "LayoutField",
    "LayoutOption",
    "LengthRefusal",
    "LogicalField",
    "Mask",
    "ModelAdapter",
    "ModelError",
    "ModelFacts",
    "NoOptions",
    "NotBuiltError",
    "PageLayout",
    "Quant",
    "Recurrent",
    "Refusal",
    "Removed",
    "Retention",
    "SizedLayout",
    "SlotWriter",
    "StagingBuffer",
    "State",
    "Stored",
    "Window",
    "ceil_div",
    "dtype",
    "gpu_facts",
    "hnd",
    "hookimpl",
    "kvcore_home",
    "nhd",
    "require_parameters",
    "torch_dtype",
    "touched_blocks",
    "write_tokens",
]

# Where each name lives. First the declarations, contents, retentions, adapters, policies and hooks: no torch.
_HOMES = {
    "attention.query": "AttentionQuery Capabilities Feature Mask",
    "attention.declaration": "API_VERSION BackendSpec DeviceFacts NoOptions",
    "errors": "BackendUnavailableError BackendUnsupportedError ConfigError IntegrityError KVCoreError LayoutError "
    "ModelError NotBuiltError Refusal",
    "manage.policies.eviction": "EvictionPolicy",
    "manage.watch.events": "Cleared Event Removed Stored",
    "models.config_json": "Fields",
    "models.facts": "CacheFacts LengthRefusal ModelAdapter ModelFacts",
    "models.families.base": "FamilyAdapter",
    "models.home": "kvcore_home",
    "models.parts": "CachePart Heads LatentHeads Recurrent",
    "registry.hookspecs": "hookimpl",
    "registry.signatures": "require_parameters",
    "settings.cache": "CacheSettings",
    "spec.cache_spec": "CacheId KVCacheSpec",
    "spec.content": "Content KVHeads Latent LogicalField Quant State",
    "spec.dtypes": "ceil_div dtype",
    "spec.layout": "TOKEN Axis KernelBlocks LayoutField LayoutOption PageLayout SizedLayout hnd nhd",
    "spec.retention": "Chunk Encoder Full Latest Retention Window touched_blocks",
    # The backend itself, and what the core lends it: torch.
    "attention.backend": "AttentionBackend AttentionGroup AttentionLayer",
    "attention.batch": "Batch GroupBatch",
    "attention.device": "gpu_facts",
    "memory.dtypes": "torch_dtype",
    "memory.kernels.cache_write": "write_tokens",
    "memory.kernels.launch": "Launcher",
    "memory.slot_writer": "SlotWriter",
    "memory.staging": "StagingBuffer",
}
MODULE_OF = {name: f"kvcore.{module}" for module, names in _HOMES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    if name not in MODULE_OF:
        raise AttributeError(f"kvcore.backend has no {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(MODULE_OF[name]), name)


def __dir__() -> list[str]:
    return __all__
