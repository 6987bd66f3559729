"""`PagedCache`: the cache of one rank, from the integers of a step to the kernels that read its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from kvcore.attention.batch import Batch
from kvcore.attention.query import AttentionQuery
from kvcore.errors import IntegrityError
from kvcore.manage.allocation import StepAllocation, TableDeltas
from kvcore.manage.ragged import Ints
from kvcore.memory.batch_builder import BatchBuilder
from kvcore.memory.block_table import BlockTables
from kvcore.plan.capacity import Limits
from kvcore.plan.config import KVCacheConfig
from kvcore.registry.registry import Registry
from kvcore.spec.cache_spec import CacheId
from kvcore.worker.bound_attention import Parameters, bind
from kvcore.worker.cache_engine import CacheEngine
from kvcore.worker.forward_context import StepContext


class PagedCache:
    """Arena, views, block tables, batches and bound backends of one rank.

    A sequence lives under a row, any integer from 0 that its owner chooses; at most `limits.max_num_seqs` are held
    at once. A step is: give rows their blocks, `begin`, then for every layer `write` and `attend`::

        cache.enter(row)                              # once
        cache.assign(row, group, blocks)              # blocks of whoever keeps them
        cache.begin([row], [len(prompt)])
        for layer in layers:
            cache.write(layer, keys, values)
            out = cache.attend(layer, queries)

    With the block manager of this library, `begin_allocated` takes the place of the first three.

    Args:
        config: The plan of this rank.
        queries: What attention asks of each cache.
        limits: Longest sequence, most tokens and sequences of a step.
        registry: Installed plugins, for the backends that the plan names.
        device: Torch device.
        options: Options of each backend, by its name.
        parameters: For a cache, the layer's own tensors: ``sinks``, ``alibi_slopes``, ``k_scale`` and ``v_scale``
            where it has them.
        memory: Memory to lie in, which somebody else allocated; see `Arena`.
        sanitize: Poison cache content when it dies.

    Attributes:
        config: The plan.
        memory: The bytes, and the block operations before a step.
        attention: The bound layers.
        context: Hands both to a model of this library.
        tables: Block tables, by place; the place of a row is the cache's own affair.
        positions_T: int64 [max_num_batched_tokens], the position of each token of the step.

    Raises:
        SpecError: A layer lacks a tensor that its query names.
        CapacityError, ConfigError: The arena cannot be had.
    """

    def __init__(
        self,
        config: KVCacheConfig,
        queries: Mapping[CacheId, AttentionQuery],
        limits: Limits,
        registry: Registry,
        *,
        device: str | torch.device = "cpu",
        options: Mapping[str, Any] | None = None,
        parameters: Parameters = lambda cache_id: {},
        memory: torch.Tensor | None = None,
        sanitize: bool = False,
    ) -> None:
        self.config, self.device = config, torch.device(device)
        names = dict.fromkeys(g.backend for g in config.kv_cache_groups if g.backend is not None)
        specs = {name: registry.backend(name) for name in names}
        backends = {
            name: spec.create(str(device), (options or {}).get(name, spec.Config())) for name, spec in specs.items()
        }
        # Kernels that load unwritten slots are promised finite ones, whatever their last owner left there: bytes of
        # another type, poison, or the NaN of a request that overflowed.
        zero = any(spec.reads_unwritten_slots for spec in specs.values())
        self.memory = CacheEngine(config, device, zero_new_blocks=zero, poison=sanitize, memory=memory)
        self.attention = bind(queries, config, self.memory.views, backends, parameters)
        self.context = StepContext(self.attention)
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        self.tables = BlockTables(config, seqs, limits.max_model_len, device, max_scheduled=tokens)
        self._builder = BatchBuilder(config, seqs, tokens, device)
        self.positions_T = self._builder.positions_T
        self._places: Ints = np.zeros(0, np.int64)  # of each row in the tables; -1 for none
        self._lengths: Ints = np.zeros(seqs, np.int64)  # tokens of each place after the last step that it was part of
        self._free = list(range(seqs - 1, -1, -1))

    # ---- rows

    def enter(self, row: int) -> None:
        """Begin a sequence, or begin it anew: its tables are empty, and no token is computed.

        Raises:
            IntegrityError: All rows are taken.
        """
        if row >= len(self._places):
            self._places = np.concatenate((self._places, np.full(row + 1, -1)))
        if self._places[row] < 0:
            if not self._free:
                raise IntegrityError(
                    "more requests than rows",
                    field="max_num_seqs",
                    got=len(self._lengths) + 1,
                    allowed=len(self._lengths),
                    remedy="leave the rows of sequences that ended",
                )
            self._places[row] = self._free.pop()
        place = int(self._places[row])
        self.tables.clear(place)
        self._lengths[place] = 0

    def leave(self, row: int) -> None:
        """End a sequence; one that never entered is none."""
        if self.holds(row):
            self._free.append(int(self._places[row]))
            self._places[row] = -1

    def holds(self, row: int) -> bool:
        """Whether the row has entered and not left."""
        return 0 <= row < len(self._places) and bool(self._places[row] >= 0)

    @property
    def rows(self) -> list[int]:
        """The rows that are held, in order."""
        held: list[int] = (self._places >= 0).nonzero()[0].tolist()
        return held

    def num_tokens(self, row: int) -> int:
        """Tokens of a row that are in the cache after the last step."""
        return int(self._lengths[self._place(row)])

    def blocks(self, row: int) -> list[list[int]]:
        """Per KV group, the blocks that a row holds, oldest first."""
        return self.tables.blocks(self._place(row))

    # ---- blocks

    def assign(self, row: int, group: int, blocks: Sequence[int], *, drop_front: int = 0) -> None:
        """Append blocks to a row's table, where the caller keeps the blocks.

        Args:
            row: A row that entered.
            group: Index of the KV group.
            blocks: Ids, the null block not among them; they count as new, and what they held is lost.
            drop_front: How many of its oldest blocks the row gives up first; no token of theirs is read again.

        Raises:
            IntegrityError, CapacityError: As `BlockTables.apply`; nothing has changed.
        """
        self.tables.apply(group, self._place(row), _Appended(blocks, drop_front))
        self.memory.before_step((), [(group, block) for block in blocks])

    def change(self, deltas: TableDeltas, copies: Ints, new_blocks: Ints, dead: Ints) -> None:
        """What a step changes, as a manager made it: the tables, then block copies and zeroing.

        Args:
            deltas: Of rows that entered.
            copies: int [c, 3] (group, from, to).
            new_blocks: int [n, 2] (group, block).
            dead: int [d, 2] (group, block) whose content died.
        """
        self.tables.apply_step(self._places[deltas.rows], deltas)
        self.memory.before_step(copies.tolist(), new_blocks.tolist(), dead.tolist())

    # ---- a step

    def begin(self, rows: Ints | Sequence[int], counts: Ints | Sequence[int], computed: Ints | None = None) -> Batch:
        """Start a step over rows whose tables hold the blocks of all their tokens.

        Args:
            rows: [n] the sequences; decodes first.
            counts: [n] tokens of each that the step computes, at least 1.
            computed: [n] tokens of each that are in the cache already; as of the last steps when None.

        Returns:
            The batch, valid until the next one begins. Token t of the step lies at ``positions_T[t]``.

        Raises:
            IntegrityError: A row has not entered, or does not hold the blocks of its tokens.
            CapacityError: The step is larger than `limits` allow.
        """
        given = np.asarray(rows, np.int64)
        inside = (given >= 0) & (given < len(self._places))
        if not inside.all() or (self._places[given] < 0).any():
            raise IntegrityError(
                "a row of the step has not entered", field="rows", got=given.tolist(), allowed=self.rows
            )
        places, counted = self._places[given], np.asarray(counts, np.int64)
        done = self._lengths[places] if computed is None else computed
        batch = self._builder.build(places.tolist(), counted.tolist(), done.tolist(), self.tables)
        self._lengths[places] = done + counted
        self.attention.begin(batch)
        return batch

    def begin_allocated(self, step: StepAllocation) -> Batch:
        """Start a step that a `KVCacheManager` of the same plan allocated; rows enter with their first step.

        Whoever frees a row in the manager lets it `leave` here as well.
        """
        for row in step.rows.tolist():
            if not self.holds(row):
                self.enter(row)
        self.change(step.deltas, step.copies, step.new_blocks, step.dead)
        return self.begin(step.rows, step.ends - step.starts, step.starts)

    def write(self, layer: int | CacheId, key_TKD: torch.Tensor, value_TKDv: torch.Tensor) -> None:
        """Store the step's keys [T, K, D] and values [T, K, Dv] of a layer; see `BoundAttention.write`."""
        self.attention.write(CacheId(layer) if isinstance(layer, int) else layer, key_TKD, value_TKDv)

    def attend(
        self,
        layer: int | CacheId,
        query_THD: torch.Tensor,
        out_THD: torch.Tensor | None = None,
        lse_TH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of the step's queries [T, H, D]: [T, H, Dv]; see `BoundAttention.attend`."""
        return self.attention.attend(CacheId(layer) if isinstance(layer, int) else layer, query_THD, out_THD, lse_TH)

    def _place(self, row: int) -> int:
        if not self.holds(row):
            raise IntegrityError("this row has not entered", field="row", got=row, allowed=self.rows)
        return int(self._places[row])


class _Appended:
    """Blocks at the end of a row; all that it holds stays, less some at the front."""

    def __init__(self, ids: Sequence[int], drop_front: int) -> None:
        self.ids, self.drop_front, self.keep = ids, drop_front, 2**31 - 1
