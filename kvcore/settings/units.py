"""Bytes as people write them."""

from __future__ import annotations

import re

from kvcore.errors import ConfigError

UNITS = {
    "": 1,
    "B": 1,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
}
_PATTERN = re.compile(r"([0-9]{1,20}(?:\.[0-9]{1,20})?)\s*([A-Za-z]*)")
# More than any machine has, and within what 64 bits address.
MOST_BYTES = 2**60


def parse_bytes(key: str, text: str | int, *, least: int = 0) -> int:
    """Bytes of ``2GiB`` (binary units), ``2GB`` (decimal units) or a plain number.

    Raises:
        ConfigError: Not a size, below `least` or beyond every machine; names `key`.
    """
    match = _PATTERN.fullmatch(str(text).strip())
    factor = UNITS.get(match[2].upper()) if match else None
    if match is None or factor is None:
        raise ConfigError(
            f"{key} is not a size in bytes",
            field=key,
            got=text,
            allowed="a number, or one with KiB, MiB, GiB, TiB, KB, MB, GB or TB",
        )
    whole, _, part = match[1].partition(".")
    # In integers: 0.1 GiB of a float would lose bytes.
    size = int(whole) * factor + (int(part) * factor // 10 ** len(part) if part else 0)
    if not least <= size <= MOST_BYTES:
        raise ConfigError(f"{key} is out of range", field=key, got=text, allowed=f"{least} bytes to 1024 PiB")
    return size
