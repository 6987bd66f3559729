"""`TextStream`: tokens in, text out as soon as it is certain, ending at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from kvcore.models.tokenizer import Tokenizer


class TextStream:
    """The text of one sample as it grows.

    Text that could still turn out to be the beginning of a stop string is held back.

    Args:
        tokenizer: Decodes.
        stop: Texts that end the output; they are cut off.

    Attributes:
        text: All text released so far.
        stopped: Whether a stop string has ended it.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._stop = tuple(stop)
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, possibly empty."""
        return "" if self.stopped else self._take(self._detokenizer.push(token_id), last=False)

    def finish(self) -> str:
        """What was held back, when no more tokens come."""
        return "" if self.stopped else self._take(self._detokenizer.finish(), last=True)

    def _take(self, fresh: str, *, last: bool) -> str:
        self._held += fresh
        cut = self._first_stop()
        if cut is not None:
            self.stopped, release = True, self._held[:cut]
        elif last:
            release = self._held
        else:
            release = self._held[: len(self._held) - self._possible_stop()]
        self._held = self._held[len(release) :]
        self.text += release
        return release

    def _first_stop(self) -> int | None:
        """Where the earliest stop string in the held text begins."""
        found = [at for at in (self._held.find(s) for s in self._stop) if at >= 0]
        return min(found, default=None)

    def _possible_stop(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stop:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest
