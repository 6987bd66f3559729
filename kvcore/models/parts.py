"""What a layer is made of: attention over heads or latents, an indexer, a recurrent state."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.attention.query import Mask
from kvcore.spec.cache_spec import CacheId
from kvcore.spec.retention import Chunk, Compressed, Encoder, Full, Retention, Window


@dataclass(frozen=True)
class Heads:
    """Softmax attention over keys and values of heads.

    Attributes:
        num_heads, num_kv_heads, head_dim: Geometry.
        head_dim_v: Value dimension; None is `head_dim`.
        mask: Which keys a query sees; a window or chunk also bounds what is kept.
        scale, softcap, alibi, sinks: As in `AttentionQuery`.
        role: Role of the cache within the layer.
        shares: The cache it reads instead of owning one.
        encoder_tokens: Length of the encoder's output, for cross attention.
        keys_are_values: Whether the layer has no projection of values; both are stored all the same.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int | None = None
    mask: Mask = field(default_factory=Mask)
    scale: float | None = None
    softcap: float | None = None
    alibi: bool = False
    sinks: bool = False
    role: str = "self"
    shares: CacheId | None = None
    encoder_tokens: int | None = None
    keys_are_values: bool = False

    @property
    def retention(self) -> Retention:
        """What the mask lets go."""
        if self.encoder_tokens is not None:
            return Encoder(self.encoder_tokens)
        if self.mask.window is not None:
            return Window(self.mask.window)
        return Full() if self.mask.chunk is None else Chunk(self.mask.chunk)


@dataclass(frozen=True)
class LatentHeads:
    """Multi-head latent attention; `num_heads` queries read one latent a token.

    Attributes:
        num_heads: Query heads.
        rank, rope_dim: What one entry stores.
        scale: Softmax scale.
        mask: Which keys a query sees; a window also bounds what is kept.
        role: Role of the cache within the layer.
        rate: Tokens that one entry stands for; above 1 the entries are compressed from a run of tokens.
    """

    num_heads: int
    rank: int
    rope_dim: int
    scale: float | None = None
    mask: Mask = field(default_factory=Mask)
    role: str = "self"
    rate: int = 1

    @property
    def retention(self) -> Retention:
        """What the mask lets go, or one entry for a run of tokens."""
        if self.rate > 1:
            return Compressed(self.rate)
        return Full() if self.mask.window is None else Window(self.mask.window)


@dataclass(frozen=True)
class Indexer:
    """A sparse indexer, whose scores are no attention of ours.

    Attributes:
        dim: Dimension of its keys.
        rate: Tokens that one key stands for.
        role: Role of the cache within the layer.
    """

    dim: int
    rate: int = 1
    role: str = "indexer"

    @property
    def retention(self) -> Retention:
        """Every key stays."""
        return Full() if self.rate == 1 else Compressed(self.rate)


@dataclass(frozen=True)
class Recurrent:
    """Recurrent state.

    Attributes:
        tensors: Name, shape and element type of each tensor; None is the model's type.
        role: Role of the cache within the layer.
        heads: Of each tensor, the heads that tensor ranks share out; as in `State`.
    """

    tensors: tuple[tuple[str, tuple[int, ...], str | None], ...]
    role: str = "state"
    heads: tuple[tuple[tuple[int, int], ...], ...] = ()


CachePart = Heads | LatentHeads | Indexer | Recurrent
