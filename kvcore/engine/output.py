"""`TextStream`: tokens in, text out as soon as it is certain, ending at a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from kvcore.models.tokenizer import Tokenizer


class TextStream:
    """The text of one sample as it grows.

    Text that could still turn out to be the beginning of a stop string is held back. Special tokens show no text, but
    a stop string can name them: it is looked for in the text as shown, and in the text with special tokens spelled out.

    Args:
        tokenizer: Decodes.
        stop: Texts that end the output; they are cut off.
        min_tokens: The text of so many tokens is out of their reach.

    Attributes:
        text: All text released so far.
        stopped: Whether a stop string has ended it.
        stop_reason: The stop string that has.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stop = tuple(stop)
        self._early = min_tokens
        self._held = ""
        self._specials: list[tuple[int, str]] = []  # offset in the held text, and how the token is spelled
        self.text = ""
        self.stopped = False
        self.stop_reason: str | None = None

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, possibly empty."""
        if self.stopped:
            return ""
        fresh = self._detokenizer.push(token_id)
        if self._early > 0:
            self._early -= 1
            return self._release(fresh)
        if not self._stop:
            return self._release(fresh)
        special = self._tokenizer.special_text(token_id)
        if special is not None:
            return self._end_at_special(special)
        return self._take(fresh)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        text = self._take(self._detokenizer.finish())
        return text if self.stopped else text + self._release(self._held)

    def _release(self, text: str) -> str:
        self._held, self._specials = "", []
        self.text += text
        return text

    def _end_at_special(self, special: str) -> str:
        # If the output ends here, what the detokenizer holds back stands before the token.
        rest = self._detokenizer.rest()
        before = self._held, list(self._specials)
        self._held += rest
        self._specials.append((len(self._held), special))
        text = self._take("")
        if self.stopped or not rest:
            return text
        self._held, self._specials = before
        self._specials.append((len(self._held), special))
        return ""

    def _take(self, fresh: str) -> str:
        self._held += fresh
        spelled, origin = self._spelled()
        found = [
            (at, stop)
            for stop in self._stop
            for at in (self._held.find(stop), _shown(spelled.find(stop), origin))
            if at >= 0
        ]
        if found:
            cut, self.stop_reason = min(found)
            self.stopped = True
            return self._release(self._held[:cut])
        spelled_from = len(spelled) - _beginning(spelled, self._stop)
        keep = min(len(self._held) - _beginning(self._held, self._stop), origin[spelled_from])
        ends = accumulate((len(text) for _, text in self._specials), initial=0)
        next(ends)
        self._specials = [
            (at - keep, text)
            for (at, text), length in zip(self._specials, ends, strict=True)
            if at + length > spelled_from  # its spelling ends behind the place from where a match can begin
        ]
        released, self._held = self._held[:keep], self._held[keep:]
        self.text += released
        return released

    def _spelled(self) -> tuple[str, Sequence[int]]:
        """The held text with special tokens spelled out, and for each of its places that in the held text."""
        if not self._specials:
            return self._held, range(len(self._held) + 1)
        pieces, origin, start = [], list[int](), 0
        for at, special in self._specials:
            pieces += [self._held[start:at], special]
            origin += [*range(start, at), *([at] * len(special))]
            start = at
        pieces.append(self._held[start:])
        origin += range(start, len(self._held) + 1)
        return "".join(pieces), origin


def _shown(at: int, origin: Sequence[int]) -> int:
    return origin[at] if at >= 0 else -1


def _beginning(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    longest = 0
    for stop in stops:
        for size in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:size]):
                longest = size
                break
    return longest
