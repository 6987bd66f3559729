"""Text to tokens and back; local files only."""

from __future__ import annotations

from functools import cached_property
from os.path import lexists
from pathlib import Path
from typing import Any

from kvcore.errors import ConfigError, ModelError
from kvcore.models.config_json import Fields, read_config
from kvcore.models.detokenizer import Detokenizer, Vocabulary
from kvcore.models.families.base import eos_ids
from kvcore.models.json_file import read_object


def eos_token_ids(path: str | Path) -> tuple[int, ...]:
    """Ids that end a text: from `generation_config.json`, else from `config.json`.

    Raises:
        ModelError: A file is damaged, or its ids are none.
    """
    file = Path(path) / "generation_config.json"
    found = eos_ids(read_object(file).get("eos_token_id"), file.name) if lexists(file) else ()
    return found or eos_ids(Fields(read_config(path)).get("eos_token_id"))


class Tokenizer:
    """A Hugging Face tokenizer.

    Args:
        tokenizer: From `AutoTokenizer`.
        eos_token_ids: Ids that end a text; the tokenizer's own end-of-text token joins them.
    """

    def __init__(self, tokenizer: Any, eos_token_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.vocabulary = Vocabulary(tokenizer)
        own = getattr(tokenizer, "eos_token_id", None)
        self.eos_token_ids = tuple(dict.fromkeys([*eos_token_ids, *([] if own is None else [int(own)])]))

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
            tokenizer("a")  # some of what its files say is read at the first text only
        except Exception as error:  # of any class: the parser of tokenizer.json raises bare ones
            raise ModelError(
                f"the tokenizer cannot be loaded: {_short(error)}",
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
            ModelError: The template fails.
        """
        if not chat:
            return [int(i) for i in self._tokenizer(prompt)["input_ids"]]
        if not self.has_chat_template:
            raise ConfigError(
                "the tokenizer has no chat template", field="chat", got=True, allowed="false", remedy="set chat=false"
            )
        messages = [{"role": "user", "content": prompt}]
        try:
            text = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is anybody's program
            raise ModelError(
                f"the chat template fails: {_short(error)}",
                field="chat",
                got=True,
                allowed="a template that takes one message of a user",
                remedy="set chat=false",
            ) from error
        # The template writes its special tokens itself.
        return [int(i) for i in self._tokenizer(text, add_special_tokens=False)["input_ids"]]

    @cached_property
    def turn_ids(self) -> tuple[int, ...]:
        """The special token that ends an answer in the chat template, if one does.

        Found by rendering an answer and looking at what follows it. A template that renders no answers, or
        follows them with plain text, names none.
        """
        if not self.has_chat_template:
            return ()
        answer = "kvcore-answer"
        chat = [{"role": "user", "content": "question"}, {"role": "assistant", "content": answer}]
        try:
            text: str = self._tokenizer.apply_chat_template(chat, tokenize=False)
        except Exception:  # a template is anybody's program
            return ()
        _, found, behind = text.rpartition(answer)
        if not found or not behind.strip():
            return ()
        first = self._tokenizer(behind.strip(), add_special_tokens=False)["input_ids"][:1]
        return tuple(int(i) for i in first if int(i) in self.vocabulary.special)

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, special tokens left out."""
        return self.vocabulary.decode(token_ids)

    def detokenizer(self) -> Detokenizer:
        """A stream of text for one output."""
        return Detokenizer(self.vocabulary)

    def special_text(self, token_id: int) -> str | None:
        """The text of a special token, which decoding leaves out; None for any other."""
        return self.vocabulary.special.get(token_id)


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
