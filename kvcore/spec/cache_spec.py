"""`KVCacheSpec` = content x retention, addressed by (layer, role)."""

from __future__ import annotations

from collections.abc import Sequence
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


# Pieces of a list of layers that people are shown.
MOST_PIECES = 6


def shown(caches: Sequence[CacheId]) -> str:
    """Caches in words, as they are: ``L0 to L3, L5``; ``L1, L3, ..., L23``; ``L0, L1, L4, L5 and 12 more``."""
    pieces: list[str] = []
    at = 0
    while at < len(caches):
        if len(pieces) == MOST_PIECES:
            return f"{', '.join(pieces)} and {len(caches) - at} more"
        first = caches[at]
        step = caches[at + 1].layer - first.layer if at + 1 < len(caches) else 0
        end = at + 1
        while step > 0 and end < len(caches) and caches[end] == CacheId(first.layer + (end - at) * step, first.role):
            end += 1
        if (end - at <= 3 and step != 1) or end - at < 3:
            end = at + 1
            pieces.append(str(first))
        else:
            pieces.append(
                f"{first} to {caches[end - 1]}" if step == 1 else f"{first}, {caches[at + 1]}, ..., {caches[end - 1]}"
            )
        at = end
    return ", ".join(pieces)


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

    @property
    def bytes_per_token(self) -> int | float:
        """Bytes that one token adds; a fraction where an entry of odd size stands for several tokens."""
        whole, rest = divmod(self.content.bytes_per_token, self.retention.rate)
        return whole + rest / self.retention.rate if rest else whole
