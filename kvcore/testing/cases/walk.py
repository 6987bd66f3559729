"""Steps that follow one another: the tokens of a case in pieces of unlike shape. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvcore.testing.cases.case import Seq

# Tokens that each sequence gets in a step, by its number, in turn; 0 is all that is left. Steps grow and shrink in
# tokens and in sequences, and a row of one token follows a longer one and the other way round.
SHAPES = ((1, None), (5, 3, 9, 1), (None, 1), (1,), (19, None, 2), (1, 1, None, 7), (None, None, 1), (0,))


class Part(NamedTuple):
    """A piece of one sequence.

    Attributes:
        row: Which sequence.
        computed: Its tokens before the step.
        scheduled: Its tokens of the step.
    """

    row: int
    computed: int
    scheduled: int


def pieces(seqs: Sequence[Seq]) -> Iterator[list[Part]]:
    """Steps until every token was in one; those with one token and a cached prefix come first in each."""
    done, number = [s.computed for s in seqs], 0
    while any(n < s.length for n, s in zip(done, seqs, strict=True)):
        shape = SHAPES[number % len(SHAPES)]
        number += 1
        step = []
        for row, seq in enumerate(seqs):
            wanted, left = shape[row % len(shape)], seq.length - done[row]
            if wanted is None or left == 0:
                continue
            count = left if wanted == 0 else min(wanted, left)
            step.append(Part(row, done[row], count))
            done[row] += count
        if step:
            yield sorted(step, key=lambda p: not (p.scheduled == 1 and p.computed > 0))
