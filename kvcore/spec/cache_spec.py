"""`KVCacheSpec` = content x retention, addressed by (layer, role)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from kvcore.errors import SpecError
from kvcore.spec.content import Content
from kvcore.spec.retention import Latest, Retention


class CacheId(NamedTuple):
    """One cache of one layer; a layer may own several, told apart by role."""

    layer: int
    role: str = "self"

    def __str__(self) -> str:
        return f"L{self.layer}" if self.role == "self" else f"L{self.layer}.{self.role}"


@dataclass(frozen=True)
class KVCacheSpec:
    """What a cache stores and which tokens must stay.

    Attributes:
        content: What one token (or one request) stores.
        retention: Which tokens later queries may read. It is storage, and covers the layer's mask:
            a window layer may also lie under `Full`.
    """

    content: Content
    retention: Retention

    def __post_init__(self) -> None:
        if self.content.per_request != isinstance(self.retention, Latest):
            raise SpecError(
                "contents kept per request go with the retention Latest, all others without",
                field="retention",
                got=f"{type(self.content).__name__} with {type(self.retention).__name__}",
            )

    @property
    def kind(self) -> str:
        """The kind used in `backend_by_kind`: full, window, chunk, encoder, latent or state.

        A latent cache that keeps every token is of kind ``latent``.
        """
        if self.content.kind in ("latent", "state"):
            return self.content.kind
        return self.retention.kind
