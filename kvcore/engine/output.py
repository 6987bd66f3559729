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
        stopped: Whether a stop string has ended it.
        stop_reason: The stop string that has.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str], min_tokens: int = 0) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer()
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._early = min_tokens
        self._held = ""
        self._specials: list[tuple[int, str]] = []  # place in the text from that held on, and how the token is spelled
        self._pieces: list[str] = []
        self.stopped = False
        self.stop_reason: str | None = None

    @property
    def text(self) -> str:
        """All text released so far."""
        return "".join(self._pieces)

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
        if special:
            return self._end_at_special(special)
        return self._add(fresh)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        if self.stopped:
            return ""
        text = self._add(self._detokenizer.finish())
        return text if self.stopped else text + self._release(self._held)

    def _release(self, text: str) -> str:
        self._held, self._specials = "", []
        self._pieces.append(text)
        return text

    def _end_at_special(self, special: str) -> str:
        rest = self._detokenizer.peek()
        if rest is None:  # a long run of bytes, full of special tokens: nothing is known to stand next to this one
            self._specials.clear()
            return ""
        # If the output ends here, what the detokenizer holds back stands before the token.
        at = len(self._held) + len(rest)
        self._place(at)
        self._specials.append((at, special))
        start = max(0, at - self._longest)  # a match that this token completes begins behind it
        near = self._held[start:] + rest[max(0, start - len(self._held)) :]
        spelled, _ = _spelled(near, [(place - start, text) for place, text in self._specials if place >= start])
        if not rest or any(stop in spelled for stop in self._stop):
            self._held += rest
            return self._take()
        del self._specials[: -self._longest]  # too many letters ago for a match to come
        return ""

    def _add(self, fresh: str) -> str:
        if not fresh:
            return ""
        self._held += fresh
        self._place(len(self._held))
        return self._take()

    def _place(self, end: int) -> None:
        """Special tokens within a character that has become whole stand behind it: the halves were longer."""
        self._specials = [(min(at, end), text) for at, text in self._specials]

    def _take(self) -> str:
        spelled, origin = _spelled(self._held, self._specials)
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
        self._pieces.append(released)
        return released


def _spelled(shown: str, specials: Sequence[tuple[int, str]]) -> tuple[str, Sequence[int]]:
    """Text with special tokens spelled out, and for each of its places that in the text as shown."""
    if not specials:
        return shown, range(len(shown) + 1)
    pieces, origin, start = [], list[int](), 0
    for at, special in specials:
        pieces += [shown[start:at], special]
        origin += [*range(start, at), *([at] * len(special))]
        start = at
    pieces.append(shown[start:])
    origin += range(start, len(shown) + 1)
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
