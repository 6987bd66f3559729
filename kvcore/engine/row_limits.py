"""`RowLimits`: what a scheduler looks at in every step, by row, as arrays."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from kvcore.engine.request import Request
from kvcore.manage.ragged import Ints

_NONE: Ints = np.zeros(0, np.int64)


class RowLimits:
    """Grows with the rows of the manager.

    Attributes:
        draws: Tokens to draw when a prefill ends, 0 for forced ones.
        prompts: Tokens of the prompt.
        forced: Whether its tokens are given.
    """

    def __init__(self) -> None:
        self.draws: Ints = _NONE
        self.prompts: Ints = _NONE
        self.forced = np.zeros(0, np.bool_)
        self._longest: Ints = _NONE  # it ends at so many tokens
        self._endings = np.zeros(1, np.bool_)  # by token id, whether it may end a text; the last is for all larger ids

    def widen(self, rows: int) -> None:
        """Make room for so many rows."""
        more = rows - len(self.draws)
        for name in ("draws", "prompts", "forced", "_longest"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate((array, np.zeros(more, array.dtype))))

    def watch(self, token_ids: Iterable[int]) -> None:
        """These tokens end the text of some request."""
        for token in token_ids:
            if token + 2 > len(self._endings):
                self._endings = np.concatenate((self._endings, np.zeros(token + 2, np.bool_)))
            self._endings[token] = True

    def set(self, request: Request, max_model_len: int) -> None:
        """Note what holds for a request from now on."""
        row, prompt = request.row, len(request.prompt_ids)
        self.draws[row] = 0 if request.forced is not None else request.width
        self.prompts[row] = prompt
        self.forced[row] = request.forced is not None
        self._longest[row] = min(prompt + request.sampling.max_tokens, max_model_len)

    def ends(self, rows: Ints, tokens: Ints, lengths: Ints) -> tuple[Ints, Ints]:
        """Of requests with so many tokens, these the last: which are full, and which got a watched one."""
        return lengths >= self._longest[rows], self._endings.take(tokens, mode="clip")
