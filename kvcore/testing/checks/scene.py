"""`Scene`: a case made real: plan, arena, scattered blocks, history in the cache, poison everywhere else.

The plan, the tables and the batch are the core's own, as an engine makes them. History is written by
`kvcore.testing.oracle.layout_bytes`, and what a step must read or write is known here as dense arrays.
"""

from __future__ import annotations

import random
from copy import copy
from functools import cached_property
from types import SimpleNamespace

import numpy as np
import torch

from kvcore.attention.backend import AttentionGroup
from kvcore.attention.batch import Batch
from kvcore.attention.query import AttentionQuery
from kvcore.memory.arena import Arena
from kvcore.memory.batch_builder import BatchBuilder
from kvcore.memory.block_table import BlockTables
from kvcore.memory.dtypes import torch_dtype
from kvcore.memory.views import field_tensors
from kvcore.spec.cache_spec import CacheId
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.planning import Target, plan_case
from kvcore.testing.checks.held import Held
from kvcore.testing.checks.scene_layer import SceneLayer, make_layer
from kvcore.testing.oracle import stored
from kvcore.testing.oracle.attention import Answer, Array, Rules, sees
from kvcore.testing.oracle.layout_bytes import PagedBytes
from kvcore.testing.oracle.memo import remembered
from kvcore.testing.oracle.poison_bytes import poison_everything, soften


class Scene:
    """A case on one backend, ready to run.

    Args:
        case: The case.
        target: Backend, options and device.
        seed: Of the placement of blocks; the data depend on the case alone.
        elements: Least number of elements that a view spans. With these, or with `least_blocks` of the case, blocks
            lie at both ends of the arena and nothing is poisoned, so that the middle of it takes no memory.

    Attributes:
        config: The plan.
        arena: Its bytes, on the device.
        layers: The layers, those of the neighbour last.
        slots: Per KV group and sequence, the slot of each token; -1 where no block is held.

    Raises:
        Refused: The backend has no such layout or block size, or the plan refuses the combination.
    """

    def __init__(self, case: Case, target: Target, *, seed: int = 0, elements: int = 0) -> None:
        self.case, self.target = case, target
        self.large = elements > 0 or case.least_blocks > 0
        self.specs, self.config = plan_case(case, target, elements=elements)
        self._rng = random.Random(1000 * seed + case.seed)
        self.arena = Arena(self.config.total_bytes, target.device)
        self._hold_blocks()
        self.layers = self._make_layers()
        self._kept = {x.layer.cache_id: Held(x) for x in self.layers}
        self._fill()

    def anew(self) -> Scene:
        """The same scene as nothing has touched it yet, in an arena of its own; for scenes that are not used."""
        other = copy(self)
        other.arena = Arena(self.config.total_bytes, self.target.device)
        other.arena.raw.copy_(self.arena.raw)
        other.layers = [layer.anew() for layer in self.layers]
        other.slots = [[list(slots) for slots in rows] for rows in self.slots]
        other.held = [set(blocks) for blocks in self.held]
        return other

    # -- the step ------------------------------------------------------------------------------------

    @cached_property
    def views(self) -> dict[CacheId, dict[str, torch.Tensor]]:
        """What a backend sees of each cache."""
        return {c: field_tensors(self.arena, self.config, c) for c in self.specs}

    @cached_property
    def builder(self) -> BatchBuilder:
        """Makes batches of the case's sequences."""
        return BatchBuilder(self.config, len(self.case.seqs) + 2, self.case.tokens + 4, self.target.device)

    @cached_property
    def batch(self) -> Batch:
        """The step."""
        return self.build()

    def build(self) -> Batch:
        """The batch of the step; the one before becomes invalid."""
        seqs = self.case.seqs
        return self.builder.build(
            list(range(len(seqs))), [s.scheduled for s in seqs], [s.computed for s in seqs], self.tables
        )

    def groups(self) -> list[AttentionGroup]:
        """The attention groups; `SceneLayer.group` counts them."""
        found = []
        for number in range(1 + max(x.group for x in self.layers)):
            mine = [x for x in self.layers if x.group == number]
            kv_group = self.config.kv_cache_groups[mine[0].kv_group]
            layers = tuple(x.layer for x in mine)
            found.append(AttentionGroup(kv_group.index, layers[0].query, layers, kv_group.layout))
        return found

    def fresh(self, layer: SceneLayer, *, fused: bool = False) -> dict[str, torch.Tensor]:
        """The step's keys and values [T, K, D], or latents [T, D].

        With `fused` they are strided slices of one tensor.
        """
        parts, names = [], stored.written(layer.content)
        for name in names:
            rows = [x[s.computed : s.length] for x, s in zip(layer.dense(name), self.case.seqs, strict=True)]
            joined = torch.from_numpy(np.concatenate(rows))
            parts.append(joined[:, 0] if name == "latent" else joined)
        tensors = [p.to(torch_dtype(layer.query.dtype)).to(self.target.device) for p in parts]
        if fused:
            tensors = list(self.fuse(tensors))
        return dict(zip(names, tensors, strict=True))

    @staticmethod
    def fuse(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The same numbers as slices of one [T, n] tensor, as a fused projection gives them."""
        joined = torch.cat([t.flatten(1) for t in tensors], dim=1)
        pieces = torch.split(joined, [t[0].numel() for t in tensors], dim=1)
        return [p.view(t.shape) for p, t in zip(pieces, tensors, strict=True)]

    def step_slots(self, kv_group: int) -> list[int]:
        """The slots of the step's tokens, in the order of the flat batch."""
        return [
            j
            for slots, s in zip(self.slots[kv_group], self.case.seqs, strict=True)
            for j in slots[s.computed : s.length]
        ]

    def memory(self) -> np.typing.NDArray[np.uint8]:
        """The arena's bytes on the host: the bytes themselves on a CPU, a copy elsewhere."""
        raw = self.arena.raw
        return np.asarray((raw if raw.device.type == "cpu" else raw.cpu()).numpy().view(np.uint8))

    # -- what is right -------------------------------------------------------------------------------

    def answer(self, layer: SceneLayer, *, rules: Rules | None = None) -> Answer:
        """The oracle's answer, from the numbers that the cache must hold.

        Args:
            layer: The layer.
            rules: Other rules than the layer's, to see what a feature changes.
        """
        seqs = self.case.seqs
        keys, values = self.numbers(layer)
        return remembered(
            rules or layer.rules(),
            layer.q.double().cpu().numpy(),
            keys,
            values,
            [s.computed for s in seqs],
            [s.scheduled for s in seqs],
        )

    def numbers(self, layer: SceneLayer, *, written: bool = True) -> tuple[list[Array], list[Array]]:
        """Keys and values of each sequence as the cache holds them.

        Where it is quantized, the step's own tokens are the ones that it does hold: of two codes that are equally
        near, a backend may take either, and level 1 judges which are.

        Args:
            layer: The layer.
            written: Whether a backend has written the step's own tokens; else they count as the oracle encodes them.
        """
        seqs, found = self.case.seqs, self._kept[layer.layer.cache_id].values
        if layer.rounds_freely and written and not layer.layer.shared:
            found = {name: x.copy() for name, x in found.items()}
            new_N = np.concatenate([np.arange(s.length) >= s.computed for s in seqs])
            now = self.fields_at(layer, self.step_slots(layer.kv_group))
            for name, x in stored.decode(layer.content, now, layer.scales).items():
                found[name][new_N] = x
        if "latent" in found:
            found = {"k": found["latent"], "v": found["latent"][:, :, : layer.query.head_dim_v]}
        ends = np.cumsum([s.length for s in seqs])[:-1]
        return np.split(found["k"], ends), np.split(found["v"], ends)

    def sees_all(self, rules: Rules, s: int, tokens: slice) -> bool:
        """Whether some query of a sequence sees all of these tokens."""
        if tokens.stop > self.case.seqs[s].length:
            return False
        return bool(self.seen(rules, s)[:, tokens].all(axis=1).any())

    def seen(self, rules: Rules, s: int) -> np.typing.NDArray[np.bool_]:
        """Bool [t, n]: which tokens of a sequence each of its queries of the step sees."""
        seq = self.case.seqs[s]
        return sees(rules, np.arange(seq.computed, seq.length)[:, None], np.arange(seq.length))

    def fields_at(self, layer: SceneLayer, slots: list[int]) -> dict[str, torch.Tensor]:
        """What some slots of a layer hold now, field by field [slots, *axes]."""
        paged, found = PagedBytes(self.memory(), self.config), {}
        for field in layer.content.fields():
            like = torch.empty((0, *(n for _, n in field.axes)), dtype=torch_dtype(field.dtype))
            found[field.name] = paged.read(layer.layer.cache_id, field.name, slots, like)
        return found

    # -- making --------------------------------------------------------------------------------------

    def _hold_blocks(self) -> None:
        """Give every sequence scattered blocks in every group; a block id belongs to one group alone."""
        case = self.case
        longest = max(case.longest, 1)
        self.tables = BlockTables(self.config, len(case.seqs) + 2, longest, self.target.device)
        self.slots: list[list[list[int]]] = []
        self.held: list[set[int]] = []
        pools = self._pools()
        for group in self.config.kv_cache_groups:
            size, rows, mine = group.block_size, list[list[int]](), set[int]()
            before: list[int] = []
            for row, seq in enumerate(case.seqs):
                first = group.spec.retention.first_needed(seq.computed) // size
                count = -(-seq.length // size)
                shared = max(0, seq.shared // size)
                blocks = [before[b] if b < shared else pools[group.index].pop() for b in range(first, count)]
                before = [0] * first + blocks
                self.tables.apply(group.index, row, SimpleNamespace(drop_front=first, keep=0, ids=blocks))
                mine |= set(blocks)
                slots = [-1] * (first * size)
                for j in range(first * size, seq.length):
                    slots.append(before[j // size] * size + j % size)
                rows.append(slots)
            self.slots.append(rows)
            self.held.append(mine)

    def _pools(self) -> list[list[int]]:
        """Per group, shuffled block ids that it may hold."""
        groups = self.config.kv_cache_groups
        if self.config.placement == "slots":
            ids = list(range(1, self.config.num_blocks))
            if self.large:
                ids = [*ids[:8], *ids[-40:]]
            self._rng.shuffle(ids)
            return [ids for _ in groups]
        pages = list(range(1, self.config.num_large_pages))
        self._rng.shuffle(pages)
        pools = []
        for i, group in enumerate(groups):
            a = group.blocks_per_large_page
            ids = [page * a + j for page in pages[i :: len(groups)] for j in range(a)]
            self._rng.shuffle(ids)
            pools.append(ids)
        return pools

    def _make_layers(self) -> list[SceneLayer]:
        made: list[SceneLayer] = []
        numbers: dict[tuple[int, AttentionQuery], int] = {}
        cases = self.case.each_layer() + ([self.case.beside()] if self.case.neighbour else [])
        for (cache, spec), case in zip(self.specs.items(), cases, strict=True):
            kv_group = self.config.group_of(cache).index
            group = numbers.setdefault((kv_group, case.query()), len(numbers))
            made.append(make_layer(cache, spec, case, kv_group, group, self.target.device))
        return made

    def _fill(self) -> None:
        """Poison the arena, then write what the step may read. The null block stays zero."""
        memory = self.memory()
        if not self.large:
            poison_everything(memory, self.config, self.case.poison)
        if self.target.spec.reads_unwritten_slots:
            for group, held in zip(self.config.kv_cache_groups, self.held, strict=True):
                soften(memory, self.config, group, sorted(held))
        paged = PagedBytes(memory, self.config)
        for layer in self.layers:
            self._write_history(paged, layer)
        if self.arena.device.type != "cpu":
            self.arena.raw.copy_(torch.from_numpy(memory.view(np.int8)))

    def _write_history(self, paged: PagedBytes, layer: SceneLayer) -> None:
        """Tokens that some query of the step sees, and, for a shared cache, the step's own tokens."""
        tokens, slots, start = list[int](), list[int](), 0
        for s, seq in enumerate(self.case.seqs):
            end = seq.length if layer.layer.shared else seq.computed
            mine = np.flatnonzero(self.seen(layer.rules(), s)[:, :end].any(axis=0)).tolist()
            tokens += [start + j for j in mine]
            slots += [self.slots[layer.kv_group][s][j] for j in mine]
            start += seq.length
        if not tokens:
            return
        for field, values in self._kept[layer.layer.cache_id].fields.items():
            paged.write(layer.layer.cache_id, field, slots, values[tokens])
