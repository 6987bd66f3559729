"""Whether a case can show what it is about: the oracle's answer without it must lie beyond the tolerance.

A feature that is switched off, facts taken from another head or layer, a partition of keys whose values are lost: where
the right answer would be the same, a backend that does so passes, and the pass says nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from kvcore.spec.dtypes import ceil_div
from kvcore.testing.cases.case import Case
from kvcore.testing.checks.scene import Scene
from kvcore.testing.checks.scene_layer import SceneLayer
from kvcore.testing.oracle.attention import Answer, Rules, attention
from kvcore.testing.oracle.tolerance import lse_tolerance, output_tolerance

# Keys of the smallest partition that kernels of the field use.
PARTITION = 256
# Partitions of a sequence at most, and how many a longer one is cut into: kernels that cut into a number of parts use
# about so many, and of tens of thousands of keys any fewer than an eighth may weigh nothing in 16 bits.
PARTS, SPLITS = 24, 8
# A difference counts from this many times the tolerance: a backend may be off by one of them itself.
CLEARLY = 2
# Rows that are looked at before all others.
FEW = 16


def without_each_feature(rules: Rules, head_dim: int) -> dict[str, Rules]:
    """For each feature in use, the rules without it."""
    found = {}
    plain = {"window": None, "chunk": None, "softcap": None, "slopes_H": None, "sinks_H": None}
    words = {"slopes_H": "alibi", "sinks_H": "sinks"}
    for name, off in plain.items():
        if getattr(rules, name) is not None:
            found[words.get(name, name)] = replace(rules, **{name: off})  # type: ignore[arg-type]
    if not rules.causal:
        found["bidirectional"] = replace(rules, causal=True)
    if not np.isclose(rules.scale, head_dim**-0.5):
        found["scale"] = replace(rules, scale=head_dim**-0.5)
    return found


class Change(NamedTuple):
    """One way in which an answer can be wrong.

    Attributes:
        name: In words.
        rules: Other rules than the layer's own.
        lost: Tokens whose values count as 0.
    """

    name: str
    rules: Rules
    lost: slice = slice(0)


class Rows(NamedTuple):
    """The last `tokens` queries of one sequence."""

    sequence: int
    tokens: int


# Of cases, by how their layers are grouped: whatever backend is asked, their numbers are the same.
_known: dict[tuple[Case, tuple[tuple[int, int], ...]], list[str]] = {}


def hidden(scene: Scene) -> list[str]:
    """What the scene has and does not show in any of its rows, in words; empty where everything shows."""
    asked = scene.case, tuple((layer.kv_group, layer.group) for layer in scene.layers)
    if asked not in _known:
        found = _known[asked] = []
        for layer in scene.layers:
            look = _Look(scene, layer)
            found += [f"{c.name} of {layer.layer.cache_id}" for c in _changes(scene, layer) if not look.shows(c)]
    return _known[asked]


class _Look:
    """Compares the right answers of one layer with wrong ones.

    Args:
        scene: The scene.
        layer: Its layer.
    """

    def __init__(self, scene: Scene, layer: SceneLayer) -> None:
        self._layer, self._seqs = layer, scene.case.seqs
        self._keys, self._values = scene.numbers(layer, written=False)
        self._q = layer.q.double().cpu().numpy()
        self._ends = np.cumsum([s.scheduled for s in self._seqs])
        self._right: dict[Rows, Answer] = {}

    def shows(self, change: Change) -> bool:
        """Whether some row differs clearly; the longest sequences are asked first, and a few rows before all."""
        order = sorted(range(len(self._seqs)), key=lambda s: -self._seqs[s].length)
        few = [Rows(s, min(FEW, self._seqs[s].scheduled)) for s in order[:2]]
        return any(self._differs(rows, change) for rows in [*few, *(Rows(s, self._seqs[s].scheduled) for s in order)])

    def _differs(self, rows: Rows, change: Change) -> bool:
        if rows not in self._right:
            self._right[rows] = self._answer(rows, Change("", self._layer.rules()), right=True)
        right, wrong = self._right[rows], self._answer(rows, change)
        q, keys = self._layer.query, max(len(k) for k in self._layer.k)
        off = np.abs(wrong.out_THV - right.out_THV) > CLEARLY * output_tolerance(right, q.dtype, q.head_dim, keys)
        if off.any() or not q.lse:
            return bool(off.any())
        apart = np.abs(wrong.lse_TH - right.lse_TH)
        return bool((apart > CLEARLY * lse_tolerance(right, q.dtype, q.head_dim, keys)).any())

    def _answer(self, rows: Rows, change: Change, *, right: bool = False) -> Answer:
        s, count = rows
        end, length = int(self._ends[s]), self._seqs[s].length
        values = self._values[s]
        if change.lost.stop:
            values = values.copy()
            values[change.lost] = 0
        return attention(
            change.rules,
            self._q[end - count : end],
            [self._keys[s]],
            [values],
            [length - count],
            [count],
            conditioned=right,
        )


def _changes(scene: Scene, layer: SceneLayer) -> Iterator[Change]:
    rules, q = layer.rules(), layer.query
    for name, others in without_each_feature(rules, q.head_dim).items():
        # A window that is wider than every sequence masks nothing, and a backend must cope with that.
        if name not in ("window", "chunk") or getattr(rules, name) < scene.case.longest:
            yield Change(name, others)
    for name in ("slopes_H", "sinks_H"):
        mine, of_first = (getattr(r, name) for r in (rules, scene.layers[0].rules()))
        if mine is None:
            continue
        if q.group_size > 1:
            by_group = np.repeat(mine[:: q.group_size], q.group_size)
            yield Change(f"{name} by head", replace(rules, **{name: by_group}))  # type: ignore[arg-type]
        if layer is not scene.layers[0] and of_first is not None and len(of_first) == len(mine):
            yield Change(f"{name} by layer", replace(rules, **{name: of_first}))
    longest = scene.case.longest
    size = PARTITION if longest <= PARTITION * PARTS else PARTITION * ceil_div(longest, PARTITION * SPLITS)
    first = scene.layers[0]
    if layer.kv_group == first.kv_group and layer.group != first.group:
        yield Change("facts of the first layer", first.rules())
    for start in range(0, longest - size, size):
        lost = slice(start, start + size)
        if any(scene.sees_all(rules, s, lost) for s in range(len(scene.case.seqs))):
            yield Change(f"keys {start} to {lost.stop}", rules, lost)
