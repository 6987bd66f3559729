"""`Explanation`: where the reuse of a prompt ended, and why."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Reason = Literal[
    "disabled",
    "token",
    "salt",
    "adapter",
    "item",
    "never_cached",
    "not_computed",
    "evicted",
    "reset",
    "withdrawn",
    "window",
    "granularity",
]


class Missed(NamedTuple):
    """Some tokens of a prompt that follow each other and were not reused, and why.

    Attributes:
        reason: ``token``: what is cached goes on with another token. ``salt``, ``adapter``, ``item``: equal tokens are
            cached under other conditions. ``never_cached``: nobody had computed them (or longer ago than what is
            remembered). ``not_computed``: a running request has them and had not computed them yet. ``evicted``: their
            block served others. ``reset``: the cache was cleared. ``withdrawn``: what computed them turned out to be
            wrong. ``window``: groups that keep every token had them; a group that drops tokens lacked a block.
            ``granularity``: hits are whole blocks, and never the last token.
            ``disabled``: no prefix caching, or a model with states.
        start: The first of them.
        tokens: How many.
        ours, theirs: For ``token``: the ids at `start`, in this prompt and in what is cached.
        group: For ``window``: which group.
        step: For what was forgotten: the step before which the first of them was.
        request: For whom the block was evicted; or who was computing them.
    """

    reason: Reason
    start: int
    tokens: int
    ours: int | None = None
    theirs: int | None = None
    group: int | None = None
    step: int | None = None
    request: str | None = None

    @property
    def text(self) -> str:
        """The reason for people."""
        when = "" if self.step is None else f" before step {self.step}"
        whom = f" for request {self.request}" if self.request else ""
        told = {
            "token": f"token {self.start} is {self.ours}, and {self.theirs} in what is cached",
            "salt": "equal tokens are cached under another salt",
            "adapter": "equal tokens are cached with another adapter",
            "item": "equal tokens are cached that stand for another item",
            "never_cached": "nobody had computed them",
            "not_computed": f"request {self.request} was still computing them",
            "evicted": f"evicted{when}{whom}",
            "reset": f"the cache was reset{when}",
            "withdrawn": f"withdrawn{when}: what computed them was not finite",
            "window": f"group {self.group} lacks a block that it still reads{f', evicted{when}{whom}' if when else ''}",
            "granularity": "hits are whole blocks and never the last token",
            "disabled": "nothing is reused: cache.prefix_caching is off, or the model keeps a state",
        }
        return told[self.reason]


@dataclass(frozen=True)
class Explanation:
    """Where each token of a prompt came from, when the request was admitted.

    Attributes:
        prompt_tokens: Length of the prompt, and of what was generated before a preemption.
        hit_tokens: Its beginning that the prefix cache gave.
        missed: The rest, in order: their tokens and the hit's are those of the prompt.
    """

    prompt_tokens: int
    hit_tokens: int
    missed: tuple[Missed, ...]

    def by_reason(self) -> dict[str, int]:
        """Tokens missed by reason."""
        counts: Counter[str] = Counter()
        for missed in self.missed:
            counts[missed.reason] += missed.tokens
        return dict(counts)

    def as_dict(self) -> dict[str, Any]:
        """As a JSON object; facts that a reason does not have are left out."""
        missed = [{k: v for k, v in m._asdict().items() if v is not None} | {"text": m.text} for m in self.missed]
        return {"prompt_tokens": self.prompt_tokens, "hit_tokens": self.hit_tokens, "missed": missed}
