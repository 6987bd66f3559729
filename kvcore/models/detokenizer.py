"""`Detokenizer`: the text of one output as its tokens come. The pieces add up to the decoding of all of them.

What one more token adds is not always its own text: a character may be spread over several tokens, a tokenizer may drop
the space at the start of a text, and a decoder with byte fallback shows a whole run of bytes as broken when one of them
is. `tokenizers.decoders.DecodeStream` looks at the end of the text alone: it shows the first character of such a run,
and cannot take it back (docs/decisions/engine.md has the figures). So we ask the decoder of which kind it is.
"""

from __future__ import annotations

import codecs
import re
from functools import cached_property
from typing import Any

BROKEN = "\ufffd"  # what bytes that are no UTF-8 decode to
# What `peek` may decode: so many tokens at once, and so many more for each token that came.
PEEK, PEEK_EACH = 256, 4
_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")


class Vocabulary:
    """What a stream needs to know of a tokenizer's tokens, worked out once.

    Args:
        tokenizer: From `AutoTokenizer`.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def special(self) -> dict[int, str]:
        """Text of the tokens that decoding leaves out, by id."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {})
        found = {int(i): str(token) for i, token in added.items() if getattr(token, "special", False)}
        found |= dict(zip(map(int, self.tokenizer.all_special_ids), self.tokenizer.all_special_tokens, strict=True))
        return {i: text for i, text in found.items() if not self.decode([i])}

    @cached_property
    def byte_level(self) -> bool:
        """Whether each token is a string of bytes, and nothing else happens when a text is put together."""
        from tokenizers.decoders import ByteLevel

        return isinstance(getattr(getattr(self.tokenizer, "backend_tokenizer", None), "decoder", None), ByteLevel)

    def token(self, token_id: int) -> str | None:
        """A token as the vocabulary spells it; None for an id that it has not."""
        found = self.tokenizer.convert_ids_to_tokens(token_id)
        return found if isinstance(found, str) else None

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, special tokens left out."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text


class Detokenizer:
    """The text of one output, token by token; work is linear in the tokens, whether or not they show anything.

    Args:
        vocabulary: Of its tokenizer.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._stream = _Bytes() if vocabulary.byte_level else _Window(vocabulary)
        self._peeked: str | None = None  # what `rest` returns, if it was asked for since the last token
        self._allowance = PEEK

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is not complete."""
        self._allowance += PEEK_EACH
        token = self._vocabulary.token(token_id)
        # Decoding leaves both out before it looks at anything else.
        if token is None or token_id in self._vocabulary.special:
            return ""
        self._peeked = None
        return self._stream.push(token_id, token)

    def rest(self) -> str:
        """What `finish` would return now."""
        return self._stream.rest()

    def peek(self) -> str | None:
        """As `rest`; None where it would cost more than all looks may that the tokens so far have paid for."""
        if self._peeked is None and self._stream.cost <= self._allowance:
            self._allowance -= self._stream.cost
            self._peeked = self._stream.rest()
        return self._peeked

    def finish(self) -> str:
        """What was held back, when no more tokens come; an incomplete character as U+FFFD."""
        text = self._stream.rest()
        self._stream = _Bytes() if self._vocabulary.byte_level else _Window(self._vocabulary)
        return text


class _Bytes:
    """Byte-level vocabularies: each sign of a token stands for a byte, and the text is the bytes' UTF-8."""

    cost = 0

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int, token: str) -> str:
        return self._decoder.decode(_bytes_of(token))

    def rest(self) -> str:
        pending, _ = self._decoder.getstate()
        return pending.decode("utf-8", "replace")


class _Window:
    """Any other vocabulary: the newest tokens are decoded, together with those of the piece before.

    A tokenizer may drop or add a space at the start of a text, and both decodings then do it alike. Runs of byte tokens
    are held back until they end: one bad byte makes the whole run unreadable.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._ids: list[int] = []  # those of the piece before, then those that are not shown
        self._shown = 0  # of `_ids`, those whose text was returned
        self._again = 0  # how many tokens must wait before they are decoded again

    def push(self, token_id: int, token: str) -> str:
        self._ids.append(token_id)
        waiting = len(self._ids) - self._shown
        if _BYTE.fullmatch(token) or waiting < self._again:
            return ""
        text = self.rest()
        if not text or text.endswith(BROKEN):
            # A character has four bytes at most; what waits longer is asked ever more seldom, to stay linear.
            self._again = waiting + max(1, (waiting - 4) // 2)
            return ""
        del self._ids[: self._shown]
        self._shown, self._again = len(self._ids), 0
        return text

    @property
    def cost(self) -> int:
        """Tokens that `rest` decodes."""
        return len(self._ids) + self._shown

    def rest(self) -> str:
        known = self._vocabulary.decode(self._ids[: self._shown])
        return self._vocabulary.decode(self._ids)[len(known) :]


def _bytes_of(token: str) -> bytes:
    try:
        return bytes(_BYTE_OF[sign] for sign in token)
    except KeyError:  # an added token, spelled as it is
        return token.encode("utf-8")


def _byte_signs() -> dict[str, int]:
    """GPT-2's alphabet: printable bytes of Latin-1 stand for themselves, the others for signs from U+0100 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_BYTE_OF = _byte_signs()
