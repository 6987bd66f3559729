"""Checking safetensors files by their headers, before anything is loaded. No torch.

A file starts with eight bytes of length (little endian), then that much JSON: name, dtype, shape and
``data_offsets`` of each tensor. A file that is shorter than its offsets say was cut off.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from kvcore.errors import ModelError
from kvcore.spec.dtypes import nbytes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
LARGEST_HEADER = 100 << 20


def weight_files(directory: str | Path) -> list[Path]:
    """The safetensors files of a checkpoint: the one, or all that the index names.

    Raises:
        ModelError: There are none, or one that the index names is missing.
    """
    folder = Path(directory)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise ModelError(
            f"the directory {str(directory)!r} has no weights",
            field="model.path",
            got=sorted(p.name for p in folder.glob("*.bin")) or "nothing",
            allowed=f"{SINGLE}, or {INDEX} with its files",
            remedy="convert pickled weights with save_pretrained; kvcore loads no pickles",
        )
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ModelError(f"{INDEX} is damaged: {error}", field="model.path", got=str(directory)) from error
    missing = [n for n in names if not (folder / n).is_file()]
    if missing or not names:
        raise ModelError(
            f"{INDEX} names files that are missing", field="model.path", got=missing, allowed="all of its files"
        )
    return [folder / n for n in names]


def read_header(file: Path) -> Mapping[str, Any]:
    """Entries of the tensors of one file.

    Raises:
        ModelError: The file is no safetensors file, or shorter than its header says.
    """
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(LARGEST_HEADER, size - 8):
            raise _damaged(file, f"its header should take {length} bytes, the file has {size}")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((int(t["data_offsets"][1]) for t in header.values()), default=0)
        except (ValueError, KeyError, AttributeError, TypeError, IndexError) as error:
            raise _damaged(file, f"its header is not readable: {error}") from error
    if size < 8 + length + end:
        raise _damaged(file, f"it has {size} bytes of {8 + length + end}")
    return dict(header)


def _damaged(file: Path, how: str) -> ModelError:
    return ModelError(
        f"the weights {file.name} are truncated or damaged: {how}",
        field="model.path",
        got=str(file),
        allowed="a complete safetensors file",
        remedy="fetch the file again",
    )


def weight_bytes(directory: str | Path, dtype: str) -> int:
    """Bytes of all weights once they are loaded as `dtype`; checks every file on the way.

    Raises:
        ModelError: As `weight_files` and `read_header`.
    """
    total = 0
    for file in weight_files(directory):
        for tensor in read_header(file).values():
            total += nbytes(dtype, prod(tensor["shape"]))
    return total
