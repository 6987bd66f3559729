"""`Scene`: a case made real: plan, arena, scattered blocks, history in the cache, poison everywhere else.

The plan, the tables and the batch are the core's own, as an engine makes them. History is written by
`kvcore.testing.oracle.layout_bytes`, and what a step must read or write is known here as dense arrays.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from kvcore.attention.backend import AttentionGroup, AttentionLayer
from kvcore.attention.batch import Batch
from kvcore.attention.query import AttentionQuery
from kvcore.memory.arena import Arena
from kvcore.memory.batch_builder import BatchBuilder
from kvcore.memory.block_table import BlockTables
from kvcore.memory.dtypes import torch_dtype
from kvcore.memory.views import field_tensors
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import Content
from kvcore.testing.cases.case import Case
from kvcore.testing.cases.planning import Target, plan_case
from kvcore.testing.oracle import stored
from kvcore.testing.oracle.attention import Answer, Array, Rules, attention, sees
from kvcore.testing.oracle.layout_bytes import PagedBytes
from kvcore.testing.oracle.poison_bytes import poison_everything, soften


@dataclass
class SceneLayer:
    """One layer of a scene.

    Attributes:
        layer: What the backend is given.
        kv_group: Its KV group.
        spec: Its cache.
        q: [T, H, D] in the query's dtype.
        k, v: Per sequence float64 [n, K, D], exact in the query's dtype; over latents, the latent as one
            head, and its first elements.
        own: What the oracle needs of the layer, taken before a backend sees its tensors.
        scales: Constant scales by field, float64, taken likewise.
    """

    layer: AttentionLayer
    kv_group: int
    spec: KVCacheSpec
    q: torch.Tensor
    k: list[Array]
    v: list[Array]
    own: Rules
    scales: dict[str, Array | None]

    @property
    def content(self) -> Content:
        """Its content."""
        return self.spec.content

    @property
    def rounds_freely(self) -> bool:
        """Whether two right backends may hold unlike bytes: quantized codes that are equally near, own contents."""
        return stored.is_own(self.content) or getattr(self.content, "quant", None) is not None

    @property
    def query(self) -> AttentionQuery:
        """Its facts."""
        return self.layer.query

    def dense(self, name: str) -> list[Array]:
        """What the field `name` stands for."""
        return self.v if name == "v" else self.k

    def rules(self) -> Rules:
        """What the oracle needs."""
        return self.own


class Scene:
    """A case on one backend, ready to run.

    Args:
        case: The case.
        target: Backend, options and device.
        seed: Of the placement of blocks; the data depend on the case alone.
        elements: Least number of elements that a view spans; blocks then lie at both ends of the arena,
            and only those are poisoned, so that the middle of it takes no memory.

    Attributes:
        config: The plan.
        arena: Its bytes, on the device.
        layers: The layers, those of the neighbour last.
        batch: The step.
        slots: Per KV group and sequence, the slot of each token; -1 where no block is held.

    Raises:
        Refused: The backend has no such layout or block size, or the plan refuses the combination.
    """

    def __init__(self, case: Case, target: Target, *, seed: int = 0, elements: int = 0) -> None:
        self.case, self.target = case, target
        self.large = elements > 0
        self.specs, self.config = plan_case(case, target, elements=elements)
        self._rng = random.Random(1000 * seed + case.seed)
        self.arena = Arena(self.config.total_bytes, target.device)
        self._hold_blocks()
        self.layers = self._make_layers()
        self._fill()
        self.views = {c: field_tensors(self.arena, self.config, c) for c in self.specs}
        self.builder = BatchBuilder(self.config, len(case.seqs) + 2, case.tokens + 4, target.device)
        self.batch = self.build()

    # -- the step ------------------------------------------------------------------------------------

    def build(self) -> Batch:
        """The batch of the step; the one before becomes invalid."""
        seqs = self.case.seqs
        return self.builder.build(
            list(range(len(seqs))), [s.scheduled for s in seqs], [s.computed for s in seqs], self.tables
        )

    def groups(self) -> list[AttentionGroup]:
        """The attention groups, by KV group."""
        found = []
        for group in self.config.kv_cache_groups:
            mine = tuple(x.layer for x in self.layers if x.kv_group == group.index)
            found.append(AttentionGroup(group.index, mine[0].query, mine, group.layout))
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

    def answer(self, layer: SceneLayer, *, written: bool = True, rules: Rules | None = None) -> Answer:
        """The oracle's answer, from the numbers that the cache must hold.

        Where the cache is quantized, the step's own tokens are the ones that it does hold: of two codes that
        are equally near, a backend may take either, and level 1 judges which are.

        Args:
            layer: The layer.
            written: Whether a backend has written the step's own tokens; else they count as the oracle encodes them.
            rules: Other rules than the layer's, to see what a feature changes.
        """
        seqs = self.case.seqs
        keys, values = zip(*(self.keys_and_values(layer, i, written=written) for i in range(len(seqs))), strict=True)
        return attention(
            rules or layer.rules(),
            layer.q.double().cpu().numpy(),
            list(keys),
            list(values),
            [s.computed for s in seqs],
            [s.scheduled for s in seqs],
        )

    def keys_and_values(self, layer: SceneLayer, s: int, *, written: bool = True) -> tuple[Array, Array]:
        """Keys and values [n, K, D] of a sequence as the cache holds them; see `answer`."""
        dense = {name: layer.dense(name)[s] for name in stored.written(layer.content)}
        numbers = stored.decode(layer.content, stored.encode(layer.content, dense, layer.scales), layer.scales)
        if layer.rounds_freely and written and not layer.layer.shared:
            new = self.case.seqs[s].computed
            now = self.fields_at(layer, self.slots[layer.kv_group][s][new:])
            for name, values in stored.decode(layer.content, now, layer.scales).items():
                numbers[name] = np.concatenate([numbers[name][:new], values])
        if "latent" in numbers:
            return numbers["latent"], numbers["latent"][:, :, : layer.query.head_dim_v]
        return numbers["k"], numbers["v"]

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
        made = []
        for cache, spec in self.specs.items():
            group = self.config.group_of(cache)
            case = self.case if cache.layer < self.case.layers else self.case.beside()
            made.append(self._layer(cache, spec, case, group.index))
        return made

    def _layer(self, cache: CacheId, spec: KVCacheSpec, case: Case, kv_group: int) -> SceneLayer:
        rng = np.random.default_rng((case.seed, cache.layer))
        dtype = torch_dtype(case.dtype)

        def draw(*shape: int) -> torch.Tensor:
            # Rounded first, so that the oracle sees the numbers that the backend is given.
            return torch.from_numpy(rng.standard_normal(shape)).to(dtype)

        q = draw(case.tokens, case.num_heads, case.head_dim)
        if case.quant == "token_head":
            # Large keys would leave a softmax of ones and zeros, which shows nothing.
            q = (q.double() / case.k_scale).to(dtype)
        dense: dict[str, list[Array]] = {"k": [], "v": []}
        for name, dim in (("k", case.head_dim), ("v", case.dim_v)):
            for seq in case.seqs:
                x = draw(seq.length, case.num_kv_heads, dim).double().numpy()
                if case.quant == "token_head":
                    # Tokens and heads of unlike size, so that their scales differ.
                    x *= rng.choice((0.5, 1.0, 2.0), size=(seq.length, case.num_kv_heads, 1))
                    x *= case.k_scale if name == "k" else case.v_scale
                    x = torch.from_numpy(x).to(dtype).double().numpy()
                if seq.shared:
                    x[: seq.shared] = dense[name][-1][: seq.shared]
                dense[name].append(x)
        if case.stores == "latent":
            dense["v"] = [x[:, :, : case.dim_v] for x in dense["k"]]
        slope_H = [2.0 ** (-1 - 3 * h / case.num_heads) for h in range(case.num_heads)]
        layer = AttentionLayer(
            cache,
            case.query(),
            alibi_slopes=self._own(slope_H) if case.alibi else None,
            sinks=self._own(1 + rng.standard_normal(case.num_heads)) if case.sinks else None,
            k_scale=self._constant_scale(case, case.k_scale),
            v_scale=self._constant_scale(case, case.v_scale),
            shared=case.variant == "shared",
        )
        query, mask = layer.query, layer.query.mask
        slopes, sinks, k_scale, v_scale = (
            None if t is None else t.double().cpu().numpy().copy()
            for t in (layer.alibi_slopes, layer.sinks, layer.k_scale, layer.v_scale)
        )
        own = Rules(query.softmax_scale, mask.causal, mask.window, mask.chunk, query.softcap, slopes, sinks)
        q, scales = q.to(self.target.device), {"k": k_scale, "v": v_scale}
        return SceneLayer(layer, kv_group, spec, q, dense["k"], dense["v"], own, scales)

    def _own(self, values: Any) -> torch.Tensor:
        return torch.tensor(np.asarray(values), dtype=torch.float32, device=self.target.device)

    def _constant_scale(self, case: Case, value: float) -> torch.Tensor | None:
        if case.quant == "tensor":
            return self._own(value)
        if case.quant == "head":
            return self._own([value * (1 + h / 2) for h in range(case.num_kv_heads)])
        return None

    def _fill(self) -> None:
        """Poison the arena, then write what the step may read. The null block stays zero."""
        memory = self.memory()
        if not self.large:
            poison_everything(memory, self.config, self.case.poison)
        if self.target.spec.reads_unwritten_slots:
            for group, held in zip(self.config.kv_cache_groups, self.held, strict=True):
                soften(memory, self.config, group, sorted(held))
        self.paged = PagedBytes(memory, self.config)
        for layer in self.layers:
            for s in range(len(self.case.seqs)):
                self._write_history(layer, s)
        if self.arena.device.type != "cpu":
            self.arena.raw.copy_(torch.from_numpy(memory.view(np.int8)))

    def _write_history(self, layer: SceneLayer, s: int) -> None:
        """Tokens that some query of the step sees, and, for a shared cache, the step's own tokens."""
        seq, rules = self.case.seqs[s], layer.rules()
        end = seq.length if layer.layer.shared else seq.computed
        queries = np.arange(seq.computed, seq.length)
        tokens = np.flatnonzero(sees(rules, queries[:, None], np.arange(end)).any(axis=0)).tolist()
        slots = [self.slots[layer.kv_group][s][j] for j in tokens]
        if not tokens:
            return
        dense = {name: layer.dense(name)[s] for name in stored.written(layer.content)}
        for field, values in stored.encode(layer.content, dense, layer.scales).items():
            self.paged.write(layer.layer.cache_id, field, slots, values[tokens])
