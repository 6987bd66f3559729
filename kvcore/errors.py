"""Every error that kvcore raises on purpose, each with what was given, what is allowed and what to do.

The command line prints one line from these and exits with status 2; `as_dict` is the JSON form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Self

MOST_SIGNS = 400


@dataclass(frozen=True)
class Refusal:
    """Why something is not served: the one value of selection, of models, of the kit and of every typed error.

    Attributes:
        field: The fact, key or file at fault.
        got: Its value.
        allowed: What would be accepted; None where nothing would.
        remedy: What to do instead, where there is something to do.
        reason: What would go wrong, where field and value alone do not tell.
    """

    field: str
    got: object
    allowed: object = None
    remedy: str | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return f"{self.field}={self.got} (allowed: {self.allowed})"


class KVCoreError(Exception):
    """Base of all typed errors.

    Args:
        message: One sentence that says what is wrong.
        field: The key, file or fact at fault, such as ``"cache.block_size"``.
        got: The value that was given.
        allowed: What would have been accepted.
        remedy: What the reader should do now.
    """

    def __init__(
        self,
        message: str,
        *,
        field: str | None = None,
        got: object = None,
        allowed: object = None,
        remedy: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.got = got
        self.allowed = allowed
        self.remedy = remedy

    @classmethod
    def of(cls, refusal: Refusal, message: str | None = None) -> Self:
        """The error that says what a refusal says, with its reason as the message unless another is given."""
        return cls(
            message or refusal.reason or f"{refusal.field} is not served",
            field=refusal.field,
            got=refusal.got,
            allowed=refusal.allowed,
            remedy=refusal.remedy,
        )

    @property
    def refusal(self) -> Refusal:
        """What the error says, as the value that selection, models and the kit answer with."""
        return Refusal(self.field or "", self.got, self.allowed, self.remedy, self.message)

    def __str__(self) -> str:
        parts = [self.message.rstrip(".")]
        if self.field is not None:
            parts.append(f"field: {self.field}")
        if self.got is not None:
            parts.append(f"got: {_clipped(str(self.got))}")
        if self.allowed is not None:
            allowed = self.allowed
            if isinstance(allowed, set | frozenset):
                allowed = sorted(allowed, key=natural)
            parts.append(f"allowed: {', '.join(map(str, allowed)) if isinstance(allowed, list | tuple) else allowed}")
        if self.remedy is not None:
            parts.append(f"remedy: {self.remedy}")
        return "; ".join(parts)

    def as_dict(self) -> dict[str, Any]:
        """The JSON document of this error, as `commands` promises it."""
        return {
            "error": {
                "type": type(self).__name__,
                "message": self.message,
                "field": self.field,
                "got": plain(self.got),
                "allowed": plain(self.allowed),
                "remedy": self.remedy,
            }
        }


def _clipped(text: str) -> str:
    """A value of thousands of signs, such as a pattern of layers, is not repeated in a line for people."""
    return text if len(text) <= MOST_SIGNS else f"{text[:MOST_SIGNS]}... ({len(text)} characters)"


def natural(value: object) -> list[object]:
    """A key that sorts numbers as numbers, also within names: 64 before 128, ``layer2`` before ``layer10``."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return ["", value, ""]
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"([0-9]{1,9})", str(value)))]


def plain(value: object) -> Any:
    """`value` as JSON types: containers are kept, anything else unknown becomes text."""
    if value is None or isinstance(value, str | int | float | bool):
        return value
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, set | frozenset):
        value = sorted(value, key=natural)
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    return str(value)


class ConfigError(KVCoreError):
    """A configuration value is unknown, malformed or out of range."""


class UnknownKeyError(ConfigError):
    """An override names a key that does not exist, or uses `+`, `++` or `~`."""


class NotBuiltError(KVCoreError):
    """The feature is planned and named, but not built yet."""


class SpecError(KVCoreError):
    """A content, retention or spec is impossible (a zero or negative size, an unknown dtype)."""


class LayoutError(KVCoreError):
    """A layout is malformed, or layouts cannot share bytes as asked."""


class CapacityError(KVCoreError):
    """The cache is too small for what is asked; carries the bytes needed and the length that fits."""


class OutOfBlocksError(KVCoreError):
    """A step asked for more blocks than are free; nothing has changed."""


class IntegrityError(KVCoreError):
    """Block bookkeeping contradicts itself: always a bug of kvcore or of its caller."""


class RequestError(KVCoreError):
    """A request can never be served (too long, empty, malformed sampling)."""


class NotFiniteError(KVCoreError):
    """The numbers of one request are not finite (a NaN weight, an overflow): no token can be chosen from them."""


class ModelError(KVCoreError):
    """A model directory is missing, incomplete or not understood."""


class UnsupportedModelError(ModelError):
    """The architecture is understood, but `run` cannot serve it correctly; says why."""


class PluginError(KVCoreError):
    """A plugin is broken, duplicated or speaks another contract version."""


class BackendError(KVCoreError):
    """Base of what can go wrong between a group of layers and an attention backend."""


class UnknownBackendError(BackendError):
    """No installed plugin offers a backend of this name."""


class BackendUnavailableError(BackendError):
    """The backend's library, or its kernels, are missing on this machine."""


class BackendUnsupportedError(BackendError):
    """The backend cannot serve this layer, cache or device."""
