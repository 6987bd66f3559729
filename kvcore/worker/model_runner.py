"""`ModelRunner`: applies a step's integers to tables and buffers, runs the model, draws the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch

from kvcore.attention.backend import AttentionBackend
from kvcore.attention.batch import Batch
from kvcore.errors import IntegrityError
from kvcore.manage.ragged import Ints, spans
from kvcore.memory.batch_builder import BatchBuilder
from kvcore.memory.block_table import BlockTables
from kvcore.memory.staging import uploaded
from kvcore.models.transformers_bridge import TransformersModel
from kvcore.plan.capacity import Limits
from kvcore.plan.config import KVCacheConfig
from kvcore.worker.binding import Binding, bind
from kvcore.worker.cache_engine import CacheEngine
from kvcore.worker.forward_context import StepContext
from kvcore.worker.messages import NO_TOKEN, NOTHING, Logprobs, NotFinite, SampleAsk, SchedulerOutput, StepResult
from kvcore.worker.texts import Texts

# Receives (request id, position of the first row, logits float32 [n, V]) of requests that keep logits.
LogitsSink = Callable[[str, int, torch.Tensor], None]


class SampleTokens(Protocol):
    """Draws tokens; see `kvcore.worker.sampler.Sampler`."""

    def __call__(self, logits_NV: torch.Tensor, asks: Sequence[Sequence[SampleAsk]]) -> tuple[tuple[int, ...], ...]:
        """For row n of the logits, one token for each of ``asks[n]``."""

    def logprobs(self, logits_V: torch.Tensor, ask: SampleAsk, token: int) -> Logprobs:
        """Of the chosen token and the likeliest ones."""


class ModelRunner:
    """One model on one device.

    Args:
        model: The loaded model.
        limits: Sizes of the persistent buffers.
        device: Torch device.
        sample: Draws tokens from logits.
        logits_sink: Where kept logits go.

    Attributes:
        kv_caches: The field views of every bound cache in model order: the first place of binding. The
            forward context is the second; both hold the same tensors.
    """

    def __init__(
        self,
        model: TransformersModel,
        limits: Limits,
        device: str,
        sample: SampleTokens,
        logits_sink: LogitsSink | None = None,
    ) -> None:
        self.model = model
        self.limits = limits
        self.device = device
        self.sample = sample
        self.logits_sink = logits_sink
        self.kv_caches: list[Mapping[str, torch.Tensor]] = []
        self.texts = Texts()
        self._places: Ints = np.zeros(0, np.int64)  # row of the block tables, by the row of a request; -1 for none
        self._free_rows = list(range(limits.max_num_seqs - 1, -1, -1))

    def bind(self, config: KVCacheConfig, cache: CacheEngine, backends: Mapping[str, AttentionBackend]) -> None:
        """Meet the cache: views, tables, buffers, attention groups. Called once."""
        self.cache = cache
        self.binding: Binding = bind(self.model.facts, config, cache.views, backends, self.model.attention_tensors)
        self.context = StepContext(self.binding.layers)
        self.kv_caches = [self.binding.layers[c].cache for c in sorted(self.binding.layers)]
        self.tables = BlockTables(
            config,
            self.limits.max_num_seqs,
            self.limits.max_model_len,
            self.device,
            max_scheduled=self.limits.max_num_batched_tokens,
        )
        self.builder = BatchBuilder(config, self.limits.max_num_seqs, self.limits.max_num_batched_tokens, self.device)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step."""
        batch = self.stage(output)
        logits_NV = self._forward(output, batch)
        wrong = self._not_finite_rows(output, logits_NV)
        found = self._locate(output, batch, wrong) if wrong else ()
        tokens, logprobs = self._draw(output, logits_NV, wrong)
        owners = np.repeat(np.arange(len(output.rows)), output.draws)
        none = [i for i in dict.fromkeys(owners[tokens == NOTHING].tolist()) if i not in wrong]
        return StepResult(output.step, tokens, found + tuple(NotFinite(i, NO_TOKEN) for i in none), logprobs)

    def stage(self, output: SchedulerOutput) -> Batch:
        """All of a step that comes before the model: rows, tables, block operations, batch, metadata."""
        for row in output.left.tolist():
            self._leave(row)
        for entry in output.entries:
            self._enter(entry.row)
            self.texts.enter(entry)
        self.tables.apply_step(self._places[output.deltas.rows], output.deltas)
        self.cache.before_step(output.copies.tolist(), output.new_blocks.tolist(), output.dead.tolist())
        rows = self._places[output.rows]
        batch = self.builder.build(rows.tolist(), output.counts.tolist(), output.computed.tolist(), self.tables)
        self.context.begin(batch, [b.prepare(batch, g) for b, g in self.binding.groups])
        return batch

    def _enter(self, row: int) -> None:
        if row >= len(self._places):
            self._places = np.concatenate((self._places, np.full(row + 1, -1)))
        if self._places[row] < 0:
            if not self._free_rows:
                raise IntegrityError(
                    "more requests than rows",
                    field="max_num_seqs",
                    got=self.limits.max_num_seqs + 1,
                    allowed=self.limits.max_num_seqs,
                )
            self._places[row] = self._free_rows.pop()
        self.tables.clear(int(self._places[row]))

    def _leave(self, row: int) -> None:
        self.texts.leave(row)
        if row < len(self._places) and self._places[row] >= 0:  # a request may end before it ever ran
            self._free_rows.append(int(self._places[row]))
            self._places[row] = -1

    def _forward(self, output: SchedulerOutput, batch: Batch) -> torch.Tensor:
        """Logits float32 [n, V] of the rows that `_wanted` names, in their order."""
        return self.model.forward(
            uploaded(output.token_ids.tolist(), self.device),
            self.builder.positions_T[: batch.num_tokens],
            uploaded(self._wanted(output), self.device),
            self.context,
        )

    def _locate(self, output: SchedulerOutput, batch: Batch, wrong: Sequence[int]) -> tuple[NotFinite, ...]:
        """Where each of these rows first stops being finite: the step runs again, with every layer looked at.

        The second run writes the same keys and values into the same slots. It costs a step, and only a faulty one.
        """
        ends = output.counts.cumsum().tolist()
        spans = {row: slice(ends[row] - int(output.counts[row]), ends[row]) for row in wrong}
        with self.context.watch(spans) as found:
            self._forward(output, batch)
        after = "no attention layer's numbers: what comes behind the last of them"
        return tuple(NotFinite(row, found.get(row, after)) for row in wrong)

    def _draw(
        self, output: SchedulerOutput, logits_NV: torch.Tensor, wrong: Sequence[int]
    ) -> tuple[Ints, dict[int, tuple[Logprobs, ...]]]:
        """Sample each row's tokens from its last logits, and hand kept logits to the sink."""
        wanted = self._wanted_counts(output)
        ends = np.cumsum(wanted)
        if self.logits_sink is not None:
            for i in (wanted > (output.draws > 0)).nonzero()[0].tolist():
                start = int(output.computed[i])
                self.logits_sink(self.texts.name(int(output.rows[i])), start, logits_NV[ends[i] - wanted[i] : ends[i]])
        asks = self.texts.asks(output)
        sampled = [i for i in (output.draws > 0).nonzero()[0].tolist() if i not in wrong]
        last = [int(ends[i]) - 1 for i in sampled]
        drawn = dict(zip(sampled, self.sample(logits_NV[last], [asks[i] for i in sampled]), strict=True))
        logprobs = {
            i: tuple(self.sample.logprobs(logits_NV[at], a, t) for a, t in zip(asks[i], drawn[i], strict=True))
            for i, at in zip(sampled, last, strict=True)
            if asks[i][0].logprobs is not None and NOTHING not in drawn[i]
        }
        none = ((NOTHING,) * int(n) for n in output.draws)
        tokens = [token for i, nothing in enumerate(none) for token in drawn.get(i, nothing)]
        return np.array(tokens, np.int64), logprobs

    def _not_finite_rows(self, output: SchedulerOutput, logits_NV: torch.Tensor) -> list[int]:
        """Rows of the step of which any wanted logits hold NaN or infinity, or nothing but minus infinity.

        A masked vocabulary (some minus infinities) is legal: the largest of a row tells all three.
        """
        if not len(logits_NV):
            return []
        wrong = ~torch.isfinite(logits_NV.amax(dim=-1)).cpu().numpy()
        owners = np.repeat(np.arange(len(output.rows)), self._wanted_counts(output))
        return list(dict.fromkeys(owners[wrong].tolist()))

    def _wanted_counts(self, output: SchedulerOutput) -> Ints:
        """How many logits of each row are needed: all of a row that keeps them, else the last where it draws."""
        kept = self.texts.keeps_logits(output.rows)
        counts: Ints = np.where(kept, output.counts, output.draws > 0)
        return counts

    def _wanted(self, output: SchedulerOutput) -> list[int]:
        """Positions in the flat batch whose logits are needed."""
        ends, wanted = output.counts.cumsum(), self._wanted_counts(output)
        return spans(ends - wanted, wanted).tolist()  # type: ignore[no-any-return]
