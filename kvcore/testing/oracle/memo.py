"""`remembered`: the oracle's answer to one question, kept for whoever asks it again.

One run asks each question several times (a case on a shared and on a fresh instance, other rules to see what a feature
does), and the mutants ask thousands of times. Questions are told apart by what they contain.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from kvcore.testing.oracle.attention import Answer, Array, Rules, attention

# Bytes of answers that are kept; the oldest go first.
KEPT = 256 << 20
_answers: OrderedDict[bytes, Answer] = OrderedDict()
_sizes: dict[bytes, int] = {}


def remembered(
    rules: Rules,
    q_THD: Array,
    keys: Sequence[Array],
    values: Sequence[Array],
    num_computed: Sequence[int],
    num_scheduled: Sequence[int],
) -> Answer:
    """As `attention`; the arrays of the answer are shared and read-only."""
    asked = _digest(rules, [q_THD, *keys, *values], (num_computed, num_scheduled))
    if asked in _answers:
        _answers.move_to_end(asked)
        return _answers[asked]
    answer = attention(rules, q_THD, keys, values, num_computed, num_scheduled)
    for array in _arrays(answer):
        array.setflags(write=False)
    _answers[asked] = answer
    _sizes[asked] = sum(a.nbytes for a in _arrays(answer))
    while sum(_sizes.values()) > KEPT and len(_answers) > 1:
        del _sizes[_answers.popitem(last=False)[0]]
    return answer


def _arrays(answer: Answer) -> list[Array]:
    return [answer.out_THV, answer.lse_TH, *answer.condition]


def _digest(rules: Rules, arrays: Sequence[Array], counts: object) -> bytes:
    found = blake2b(repr(counts).encode(), digest_size=16)
    facts = vars(rules)
    for name, value in facts.items():
        found.update(name.encode() + (value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode()))
    for array in arrays:
        found.update(repr(array.shape).encode())
        found.update(np.ascontiguousarray(array).view(np.uint8).data)
    return found.digest()
