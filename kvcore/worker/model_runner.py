"""`ModelRunner`: applies a step's integers to tables and buffers, runs the model, draws the tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Protocol

import torch

from kvcore.attention.backend import AttentionBackend
from kvcore.attention.batch import Batch
from kvcore.errors import IntegrityError
from kvcore.memory.batch_builder import BatchBuilder
from kvcore.memory.block_table import BlockTables
from kvcore.memory.staging import uploaded
from kvcore.models.transformers_bridge import TransformersModel
from kvcore.plan.capacity import Limits
from kvcore.plan.config import KVCacheConfig
from kvcore.worker.binding import Binding, bind
from kvcore.worker.cache_engine import CacheEngine
from kvcore.worker.forward_context import StepContext
from kvcore.worker.messages import (
    NO_TOKEN,
    NOTHING,
    Logprobs,
    NotFinite,
    SampleAsk,
    ScheduledRow,
    SchedulerOutput,
    StepResult,
)

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
        self._rows: dict[str, int] = {}
        self._texts: dict[str, tuple[tuple[int, ...], list[int]]] = {}  # prompt and output, where a penalty counts them
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
        wrong = _not_finite_rows(output, logits_NV)
        found = self._locate(output, batch, wrong) if wrong else ()
        tokens, logprobs = self._draw(output, logits_NV, wrong)
        found += tuple(NotFinite(i, NO_TOKEN) for i, drawn in enumerate(tokens) if NOTHING in drawn)
        return StepResult(output.step, tokens, found, logprobs)

    def stage(self, output: SchedulerOutput) -> Batch:
        """All of a step that comes before the model: rows, tables, block operations, batch, metadata."""
        for request_id in output.finished:
            self._drop(request_id)
        rows = [self._row(r) for r in output.rows]
        for row, scheduled in zip(rows, output.rows, strict=True):
            for group, delta in enumerate(scheduled.deltas):
                self.tables.apply(group, row, delta)
        self.cache.before_step(output.copies, output.new_blocks, output.dead)
        batch = self.builder.build(
            rows, [len(r.token_ids) for r in output.rows], [r.num_computed for r in output.rows], self.tables
        )
        self.context.begin(batch, [b.prepare(batch, g) for b, g in self.binding.groups])
        return batch

    def _row(self, scheduled: ScheduledRow) -> int:
        row = self._rows.get(scheduled.request_id)
        if row is None:
            if not self._free_rows:
                raise IntegrityError(
                    "more requests than rows",
                    field="max_num_seqs",
                    got=len(self._rows) + 1,
                    allowed=self.limits.max_num_seqs,
                )
            row = self._rows[scheduled.request_id] = self._free_rows.pop()
            self.tables.clear(row)
        return row

    def _drop(self, request_id: str) -> None:
        self._texts.pop(request_id, None)
        row = self._rows.pop(request_id, None)
        if row is not None:  # a request may end before it ever ran
            self._free_rows.append(row)

    def _forward(self, output: SchedulerOutput, batch: Batch) -> torch.Tensor:
        """Logits float32 [n, V] of the rows that `_wanted` names, in their order."""
        tokens = [t for r in output.rows for t in r.token_ids]
        return self.model.forward(
            uploaded(tokens, self.device),
            self.builder.positions_T[: batch.num_tokens],
            uploaded(_wanted(output), self.device),
            self.context,
        )

    def _locate(self, output: SchedulerOutput, batch: Batch, wrong: Sequence[int]) -> tuple[NotFinite, ...]:
        """Where each of these rows first stops being finite: the step runs again, with every layer looked at.

        The second run writes the same keys and values into the same slots. It costs a step, and only a faulty one.
        """
        ends = list(accumulate(len(r.token_ids) for r in output.rows))
        spans = {row: slice(ends[row] - len(output.rows[row].token_ids), ends[row]) for row in wrong}
        with self.context.watch(spans) as found:
            self._forward(output, batch)
        after = "no attention layer's numbers: what comes behind the last of them"
        return tuple(NotFinite(row, found.get(row, after)) for row in wrong)

    def _asks(self, row: ScheduledRow) -> tuple[SampleAsk, ...]:
        """The draws of a row, with the tokens that penalties count."""
        if not any(ask.penalized for ask in row.samples):
            return row.samples
        if row.samples[0].prompt:
            self._texts[row.request_id] = (row.samples[0].prompt, list(row.samples[0].output))
        elif row.request_id in self._texts:
            self._texts[row.request_id][1].extend(row.token_ids)
        else:
            raise IntegrityError("a penalty counts tokens that were never sent", field="prompt", got=row.request_id)
        prompt, output = self._texts[row.request_id]
        return tuple(ask._replace(prompt=prompt, output=tuple(output)) for ask in row.samples)

    def _draw(
        self, output: SchedulerOutput, logits_NV: torch.Tensor, wrong: Sequence[int]
    ) -> tuple[tuple[tuple[int, ...], ...], dict[int, tuple[Logprobs, ...]]]:
        """Sample each row's tokens from its last logits, and hand kept logits to the sink."""
        last, start, asks = [], 0, []
        for i, r in enumerate(output.rows):
            count = _wanted_count(r)
            if r.keep_logits and self.logits_sink is not None:
                self.logits_sink(r.request_id, r.num_computed, logits_NV[start : start + count])
            start += count
            asks.append(self._asks(r) if i not in wrong else ())
            if asks[-1]:
                last.append(start - 1)
        sampled = [i for i, a in enumerate(asks) if a]
        drawn = dict(zip(sampled, self.sample(logits_NV[last], [asks[i] for i in sampled]), strict=True))
        logprobs = {
            i: tuple(self.sample.logprobs(logits_NV[at], a, t) for a, t in zip(asks[i], drawn[i], strict=True))
            for i, at in zip(sampled, last, strict=True)
            if asks[i][0].logprobs is not None and NOTHING not in drawn[i]
        }
        return tuple(drawn.get(i, ()) for i in range(len(asks))), logprobs


def _not_finite_rows(output: SchedulerOutput, logits_NV: torch.Tensor) -> list[int]:
    """Rows of the step of which any wanted logits hold NaN or infinity, or nothing but minus infinity.

    A masked vocabulary (some minus infinities) is legal: the largest of a row tells all three.
    """
    if not len(logits_NV):
        return []
    finite = torch.isfinite(logits_NV.amax(dim=-1)).tolist()
    ends = accumulate(_wanted_count(r) for r in output.rows)
    return [
        i
        for i, (r, end) in enumerate(zip(output.rows, ends, strict=True))
        if not all(finite[end - _wanted_count(r) : end])
    ]


def _wanted_count(row: ScheduledRow) -> int:
    return len(row.token_ids) if row.keep_logits else int(bool(row.samples))


def _wanted(output: SchedulerOutput) -> list[int]:
    """Positions in the flat batch whose logits are needed: all of a row that keeps them, else the last."""
    wanted: list[int] = []
    end = 0
    for r in output.rows:
        end += len(r.token_ids)
        wanted += range(end - _wanted_count(r), end)
    return wanted
