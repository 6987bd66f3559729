"""Checking safetensors files by their headers, before anything is loaded. No torch.

A file starts with eight bytes of length (little endian), then that much JSON: name, dtype, shape and
``data_offsets`` of each tensor. A file that is shorter than its offsets say was cut off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from kvcore.errors import ModelError, natural
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
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()), key=natural)
        missing = [n for n in names if not (folder / n).is_file()]
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"{INDEX} is damaged: {error}", field="model.path", got=str(directory)) from error
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
    try:
        return _read_header(file, file.stat().st_size)
    except OSError as error:
        raise ModelError(
            f"cannot read the weights {file.name}: {error.strerror}", field="model.path", got=str(file)
        ) from error


def _read_header(file: Path, size: int) -> Mapping[str, Any]:
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if not 2 <= length <= min(LARGEST_HEADER, size - 8):
            raise _damaged(file, f"its header should take {length} bytes, the file has {size}")
        try:
            header = json.loads(stream.read(length))
            header.pop("__metadata__", None)
            end = max((_checked_end(t) for t in header.values()), default=0)
        except (ValueError, KeyError, AttributeError, TypeError, IndexError, RecursionError) as error:
            raise _damaged(file, f"its header is not readable: {error}") from error
    if size < 8 + length + end:
        raise _damaged(file, f"it has {size} bytes of {8 + length + end}")
    return dict(header)


def _checked_end(tensor: Mapping[str, Any]) -> int:
    """Where the bytes of a tensor end; raises for an entry that is none."""
    start, end = tensor["data_offsets"]
    if not isinstance(tensor["dtype"], str) or not 0 <= start <= end or prod(tensor["shape"]) < 0:
        raise ValueError(f"an entry with offsets {start} to {end}")
    return int(end)


def _damaged(file: Path, how: str) -> ModelError:
    return ModelError(
        f"the weights {file.name} are truncated or damaged: {how}",
        field="model.path",
        got=str(file),
        allowed="a complete safetensors file",
        remedy="fetch the file again",
    )


def weight_bytes(
    directory: str | Path, dtype: str, *, tied: bool, quantized: bool, layers: int | None = None
) -> int | None:
    """Bytes of all weights as they will lie in memory; checks every file on the way.

    Counted are the files that transformers would load, in its order: the one file, else those of the index. Other files
    beside them (a `consolidated.safetensors`, an adapter, another variant) are copies or something else.

    Args:
        directory: A Hugging Face directory.
        dtype: Element type in which floating-point weights are loaded.
        tied: Whether the config ties the output to the embeddings; a second copy on disk is then loaded once.
        quantized: Whether the config says that the weights are quantized: elements of 8 bits or less stay as stored.
        layers: Decoder layers of the model; weights of later ones (they predict further tokens) are not loaded.

    Returns:
        The bytes, or None where the directory has no safetensors checkpoint.

    Raises:
        ModelError: As `weight_files` and `read_header`.
    """
    folder = Path(directory)
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file():
        return None
    found = {name: (file, entry) for file in weight_files(folder) for name, entry in read_header(file).items()}
    if layers is not None:
        found = {name: stored for name, stored in found.items() if _decoder_layer(name) < layers}
    if tied:
        for name in _second_copies(found):
            del found[name]
    return sum(_loaded_bytes(entry, dtype, quantized) for _, entry in found.values())


def _decoder_layer(name: str) -> int:
    """The decoder layer that a tensor belongs to; -1 for all others."""
    layer = re.match(r"(?:model\.|language_model\.)*layers\.([0-9]{1,9})\.", name)
    return int(layer[1]) if layer else -1


# Floating-point types of the safetensors format that loading casts to the model's type; of quantized weights the
# narrow ones are codes, not numbers.
WIDE = {"F64", "F32", "F16", "BF16"}
NARROW = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4"}
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight", "embed_in.weight", "shared.weight")
StoredTensor = tuple[Path, Mapping[str, Any]]


def _loaded_bytes(entry: Mapping[str, Any], dtype: str, quantized: bool) -> int:
    if entry["dtype"] in WIDE or (entry["dtype"] in NARROW and not quantized):
        return nbytes(dtype, prod(entry["shape"]))
    start, end = entry["data_offsets"]
    return int(end) - int(start)


def _second_copies(found: Mapping[str, StoredTensor]) -> list[str]:
    """Output weights that equal the embeddings: transformers ties them, and loads only one."""
    heads = [n for n in found if n.endswith("lm_head.weight")]
    return [h for h in heads if any(_same(found[h], found[n]) for n in found if n.endswith(EMBEDDINGS))]


def _same(one: StoredTensor, other: StoredTensor) -> bool:
    """Whether two tensors are equal, by type, shape and a sample of their bytes: all of them may be gigabytes."""
    (_, a), (_, b) = one, other
    return (a["dtype"], a["shape"]) == (b["dtype"], b["shape"]) and _sample(one) == _sample(other)


def _sample(stored: StoredTensor, pieces: int = 64, size: int = 1 << 12) -> list[bytes]:
    file, entry = stored
    start, end = entry["data_offsets"]
    with file.open("rb") as stream:
        start += 8 + int.from_bytes(stream.read(8), "little")
        end += start - entry["data_offsets"][0]
        found = []
        for i in range(pieces):
            stream.seek(start + max(0, end - start - size) * i // (pieces - 1))
            found.append(stream.read(min(size, end - start)))
    return found
