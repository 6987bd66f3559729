"""`SamplingParams`: how the tokens of one request are chosen; the keys `sampling.*`, checked here and nowhere else."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from kvcore.errors import RequestError

_OFF_PENALTY = 1.0


def _number(default: Any, *, least: float | None = None, most: float | None = None, above: float | None = None) -> Any:
    """A field with its bounds: at least, at most, greater than."""
    return field(default=default, metadata={"least": least, "most": most, "above": above})


@dataclass(frozen=True)
class SamplingParams:
    """How the tokens of one request are chosen.

    The order of the filters is that of transformers' `generate`: penalties, then tokens that may not come yet, then
    temperature, top_k, top_p, min_p.

    Attributes:
        max_tokens: most tokens to generate
        min_tokens: before these no end-of-text id, stop id or stop text ends the output
        temperature: 0 is greedy
        top_p: nucleus filter; 1 is off
        top_k: keep the k likeliest; 0 is off
        min_p: keep tokens of at least this share of the likeliest one's probability; 0 is off
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt and output; 1 is off
        presence_penalty: subtracted from the logits of tokens in the output
        frequency_penalty: subtracted for each time that a token is in the output
        seed: sample i of a prompt draws from seed + i
        n: samples of each prompt, forked from one prefill
        stop: texts that end the output, cut off; special tokens count by their text
        stop_token_ids: ids that end the output, whatever ignore_eos says
        ignore_eos: go on after the end-of-text token
        logprobs: log-probabilities of this many likeliest tokens beside the chosen one; none unless given
    """

    max_tokens: int = _number(64, least=1)
    min_tokens: int = _number(0, least=0)
    temperature: float = _number(0.0, least=0)
    top_p: float = _number(1.0, above=0, most=1)
    top_k: int = _number(0, least=0)
    min_p: float = _number(0.0, least=0, most=1)
    repetition_penalty: float = _number(1.0, above=0)
    presence_penalty: float = _number(0.0, least=-2, most=2)
    frequency_penalty: float = _number(0.0, least=-2, most=2)
    seed: int = _number(0, least=0)
    n: int = _number(1, least=1)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = _number(None, least=0)

    def __post_init__(self) -> None:
        """Types and bounds; what depends on the engine or the model is checked when a request is added.

        Raises:
            RequestError: A value has another type or is out of range.
        """
        for f in fields(self):
            _check(f.name, getattr(self, f.name), str(f.type), f.metadata)
        for name in ("stop", "stop_token_ids"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if any(not text for text in self.stop):
            raise RequestError(
                "a stop string is empty", field="sampling.stop", got=self.stop, allowed="non-empty texts"
            )
        if self.min_tokens > self.max_tokens:
            raise RequestError(
                "sampling.min_tokens is out of range",
                field="sampling.min_tokens",
                got=self.min_tokens,
                allowed=f"at most sampling.max_tokens={self.max_tokens}",
            )

    @property
    def penalized(self) -> bool:
        """Whether any penalty is on."""
        return self.repetition_penalty != _OFF_PENALTY or bool(self.presence_penalty or self.frequency_penalty)


_KINDS: dict[str, tuple[tuple[type, ...], str]] = {
    "int": ((int,), "a whole number"),
    "int | None": ((int, type(None)), "a whole number, or nothing"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "true or false"),
    "tuple[str, ...]": ((tuple, list), "a list of texts"),
    "tuple[int, ...]": ((tuple, list), "a list of token ids"),
}


def _check(name: str, given: object, declared: str, bounds: Mapping[str, Any]) -> None:
    kinds, allowed = _KINDS[declared]
    value: Any = given
    where = f"sampling.{name}"
    # True is a number to Python, and to nobody who samples.
    if not isinstance(given, kinds) or (isinstance(given, bool) and bool not in kinds):
        raise RequestError(f"{where} is {type(given).__name__}", field=where, got=value, allowed=allowed)
    if isinstance(value, tuple | list):
        inner: type = str if "str" in declared else int
        if not all(isinstance(v, inner) and not isinstance(v, bool) for v in value):
            raise RequestError(f"{where} holds something else", field=where, got=list(value), allowed=allowed)
        return
    least, most, above = bounds.get("least"), bounds.get("most"), bounds.get("above")
    if value is None or (least is None and most is None and above is None):
        return
    # A whole number beyond every float is finite to Python, overflows in arithmetic, and may be too long to print.
    finite = abs(value) <= sys.float_info.max
    inside = finite and (least is None or value >= least) and (most is None or value <= most)
    if not inside or (above is not None and not value > above):
        low = f"> {above}" if above is not None else f">= {least}"
        raise RequestError(
            f"{where} is out of range",
            field=where,
            got=value if finite or isinstance(value, float) else "a number beyond every float",
            allowed=low if most is None else f"{low} and <= {most}",
        )
