"""Models by their name on the Hugging Face hub, through `huggingface_hub` and its cache. No torch."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from kvcore.errors import ModelError

_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
QUANTIZER = "hf_quant_config.json"
FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", "*.txt")


def is_hub_id(text: str) -> bool:
    """Whether a text has the form ``ORG/NAME``; a folder of that name goes first."""
    return _ID.fullmatch(text) is not None


def from_hub(name: str, *, weights: bool) -> Path:
    """The folder in the hub's cache that holds a model; what is missing there is fetched.

    ``HF_HUB_OFFLINE``, ``HF_HOME``, ``HF_TOKEN`` and the others count as they always do.

    Args:
        name: ``ORG/NAME``.
        weights: Whether weights and tokenizer are needed, or the config alone.

    Raises:
        ModelError: The hub cannot be reached, knows no such model or does not give it out.
    """
    import huggingface_hub as hub  # late: a local model needs none of it
    from huggingface_hub.errors import EntryNotFoundError

    try:
        config = Path(hub.hf_hub_download(name, "config.json"))
        with suppress(EntryNotFoundError):  # most have none
            hub.hf_hub_download(name, QUANTIZER)
        if weights:
            hub.snapshot_download(name, allow_patterns=list(FILES))
    except Exception as error:  # of the hub, of its HTTP library, of the disk: each has classes of its own
        raise _told(name, error) from error
    return config.parent


def _told(name: str, error: Exception) -> ModelError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    if constants.HF_HUB_OFFLINE and isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
        why, remedy = "it is not in the hub's cache, and HF_HUB_OFFLINE is set", "fetch it once without HF_HUB_OFFLINE"
    elif isinstance(error, GatedRepoError):
        why, remedy = "the hub does not give it out to everybody", "accept its terms there, and set HF_TOKEN"
    elif isinstance(error, RepositoryNotFoundError):
        why, remedy = "the hub has no such model, or it is private", "check the name, or set HF_TOKEN"
    elif isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        why, remedy = "it has no config.json", "choose a model in the format of transformers"
    else:
        why, remedy = "the hub cannot be reached, and its cache has no copy", "check the network, or name a folder"
    return ModelError(
        f"the model {name} cannot be had: {why}",
        field="model.path",
        got=name,
        allowed="a directory, a config.json, or ORG/NAME on the Hugging Face hub",
        remedy=remedy,
    )
