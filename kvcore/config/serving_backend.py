"""`ServingBackend`: one backend for the layers of an engine that keeps its own blocks and tables."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Self

from kvcore.attention.backend import AttentionBackend
from kvcore.attention.declaration import DeviceFacts
from kvcore.attention.query import AttentionQuery
from kvcore.config.build import device_of
from kvcore.config.compose import compose
from kvcore.config.schema import DeviceRoot
from kvcore.errors import BackendUnsupportedError
from kvcore.registry.choice import BackendChoice
from kvcore.registry.loader import installed
from kvcore.registry.registry import Registry
from kvcore.registry.select import choose_backends
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads, Quant
from kvcore.spec.layout import LayoutOption, SizedLayout
from kvcore.spec.retention import Full

_ANY = CacheId(0)


class ServingBackend:
    """A backend, its options and the device of this machine.

    Args:
        name: Name of an installed backend.
        options: An instance of its options.
        device: The device.
        registry: Installed plugins.

    Attributes:
        name, options, device: The same.
    """

    def __init__(self, name: str, options: Any, device: DeviceFacts, registry: Registry) -> None:
        self.name, self.options, self.device = name, options, device
        self._registry = registry

    @classmethod
    def named(cls, name: str, *overrides: str, device: str = "auto", registry: Registry | None = None) -> Self:
        """The backend of this name.

        Args:
            name: Name of an installed backend.
            overrides: Its options as on the command line, ``backends.NAME.OPTION=VALUE``.
            device: ``cpu``, ``cuda`` or ``auto``.
            registry: Plugins; None takes the installed ones.

        Raises:
            UnknownBackendError, PluginError: No installed plugin offers it, or the plugin is broken.
            ConfigError: An override is no option of an installed backend.
        """
        known = installed() if registry is None else registry
        spec = known.backend(name)
        composed = compose([f"device={device}", *overrides], known, DeviceRoot)
        options = composed.config.backends.get(name, spec.Config())
        return cls(name, options, device_of(composed, ask_torch=True, present=True), known)

    def layouts(self, query: AttentionQuery) -> tuple[LayoutOption, ...]:
        """The layouts that a block of somebody else's can have, in order of preference: those of one run of bytes.

        Raises:
            BackendUnavailableError: Its library or its kernels are missing here.
            BackendUnsupportedError: It cannot serve this query; says which fact it cannot.
        """
        spec = KVCacheSpec(content_of(query), Full())
        choice = BackendChoice(self.name, options={self.name: self.options})
        found = choose_backends({_ANY: spec}, {_ANY: query}, self.device, choice, self._registry, block_first_only=True)
        return tuple(found.offers[_ANY].options)

    def layout(self, query: AttentionQuery, block_size: int, block_bytes: int) -> SizedLayout:
        """The first layout whose blocks of `block_size` tokens have just these bytes.

        Raises:
            BackendUnavailableError, BackendUnsupportedError: As `layouts`, or no layout has them.
        """
        options = self.layouts(query)
        sized = [o.layout.at(block_size) for o in options if o.kernel_blocks.fit(block_size) == block_size]
        for layout in sized:
            if layout.kernel_page_bytes == block_bytes:
                return layout
        allowed = [f"{s.layout.name}: {s.kernel_page_bytes} bytes" for s in sized]
        raise BackendUnsupportedError(
            f"backend {self.name} has no layout for blocks of this size",
            field="layout",
            got=f"{block_size} tokens in {block_bytes} bytes",
            allowed=allowed or [f"{o.layout.name}: {o.kernel_blocks} tokens" for o in options],
            remedy="choose a block size that the backend takes",
        )

    @cached_property
    def backend(self) -> AttentionBackend:
        """The backend itself; its library is imported."""
        where = "cpu" if self.device.kind == "cpu" else "cuda"  # torch calls ROCm devices cuda as well
        return self._registry.backend(self.name).create(where, self.options)


def content_of(query: AttentionQuery) -> KVHeads:
    """What a token stores, by the attention that reads it."""
    quant = None if query.quant is None else Quant(query.quant)  # type: ignore[arg-type]  # checked by Quant
    return KVHeads(query.num_kv_heads, query.head_dim, query.head_dim_v, query.cache_dtype, quant)
