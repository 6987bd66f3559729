"""Text to tokens and back; local files only. Streaming never shows half a character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError, ModelError
from kvcore.models.config_json import Fields, read_config
from kvcore.models.families.base import eos_ids

BROKEN = "\ufffd"  # what an incomplete UTF-8 sequence decodes to


def eos_token_ids(path: str | Path) -> tuple[int, ...]:
    """Ids that end a text: from `generation_config.json`, else from `config.json`.

    Raises:
        ModelError: A file is damaged.
    """
    file = Path(path) / "generation_config.json"
    if file.is_file():
        try:
            config = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ModelError(f"{file.name} is damaged: {error}", field="model.path", got=str(path)) from error
        found = eos_ids(Fields(config)) if isinstance(config, dict) else ()
        if found:
            return found
    return eos_ids(Fields(read_config(path)))


class Tokenizer:
    """A Hugging Face tokenizer.

    Args:
        tokenizer: From `AutoTokenizer`.
        eos_token_ids: Ids that end a text.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids

    @classmethod
    def load(cls, path: str | Path) -> Tokenizer:
        """From the files of a Hugging Face directory.

        Raises:
            ModelError: They are missing or not usable.
        """
        from transformers import AutoTokenizer

        ids = eos_token_ids(path)
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
        except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
            text = " ".join(str(error).split())
            raise ModelError(
                f"the tokenizer cannot be loaded: {text[:300]}",
                field="model.path",
                got=str(path),
                allowed="a directory with tokenizer.json",
            ) from error
        return cls(tokenizer, ids)

    @property
    def has_chat_template(self) -> bool:
        """Whether `encode` can wrap a prompt."""
        return bool(getattr(self._tokenizer, "chat_template", None))

    def encode(self, prompt: str, *, chat: bool) -> list[int]:
        """Token ids of a prompt.

        Args:
            prompt: The text.
            chat: Wrap it in the chat template, with the generation prompt; else take it as it is, with
                the tokenizer's default special tokens.

        Raises:
            ConfigError: `chat` is asked for, but the tokenizer has no template.
        """
        if not chat:
            return [int(i) for i in self._tokenizer(prompt)["input_ids"]]
        if not self.has_chat_template:
            raise ConfigError(
                "the tokenizer has no chat template", field="chat", got=True, allowed="false", remedy="set chat=false"
            )
        messages = [{"role": "user", "content": prompt}]
        text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        # The template writes its special tokens itself.
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, special tokens left out."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def detokenizer(self) -> Detokenizer:
        """A stream of text for one output."""
        return Detokenizer(self)


class Detokenizer:
    """Text of one output, token by token: what `push` and `finish` return adds up to `decode` of all.

    Only the newest tokens are decoded, together with those of the piece before: a tokenizer may drop or
    add a space at the start of a text, and both decodings then do it alike.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0  # first token that is decoded again
        self._shown = 0  # tokens whose text was returned

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is not complete."""
        self._ids.append(token_id)
        text = self._pending()
        if not text or text.endswith(BROKEN):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return text

    def finish(self) -> str:
        """What is left, an incomplete character as U+FFFD."""
        text = self._pending()
        self._context = self._shown = len(self._ids)
        return text

    def _pending(self) -> str:
        known = self._tokenizer.decode(self._ids[self._context : self._shown])
        return self._tokenizer.decode(self._ids[self._context :])[len(known) :]
