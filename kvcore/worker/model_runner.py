"""`ModelRunner`: applies a step's integers to tables and buffers, runs the model, draws the tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
import torch

from kvcore.attention.batch import Batch
from kvcore.manage.ragged import Ints, spans
from kvcore.memory.staging import uploaded
from kvcore.models.forward_context import ForwardContext
from kvcore.models.transformers_bridge import TransformersModel
from kvcore.worker.messages import NO_TOKEN, NOTHING, Logprobs, NotFinite, SampleAsk, SchedulerOutput, StepResult
from kvcore.worker.paged_cache import PagedCache
from kvcore.worker.sanitizer import Sanitizer
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
    """One model on its cache.

    Args:
        model: The loaded model.
        cache: Its cache.
        sample: Draws tokens from logits.
        logits_sink: Where kept logits go.
        sanitizer: Follows and checks every step; None for none.

    Attributes:
        context: What the attention of the model calls.
        kv_caches: The field views of every bound cache in model order: the first place of binding. The
            forward context is the second; both hold the same tensors.
    """

    def __init__(
        self,
        model: TransformersModel,
        cache: PagedCache,
        sample: SampleTokens,
        logits_sink: LogitsSink | None = None,
        sanitizer: Sanitizer | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.sanitizer = sanitizer
        self.sample = sample
        self.logits_sink = logits_sink
        self.context: ForwardContext = cache.context
        layers = cache.attention.layers
        self.kv_caches = [layers[c].cache for c in sorted(layers)]
        self.texts = Texts()

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
        if self.sanitizer is not None:
            self.sanitizer.step(output)
        for row in output.left.tolist():
            self.texts.leave(row)
            self.cache.leave(row)
        for entry in output.entries:
            self.cache.enter(entry.row)
            self.texts.enter(entry)
        self.cache.change(output.deltas, output.copies, output.new_blocks, output.dead)
        batch = self.cache.begin(output.rows, output.counts, output.computed)
        if self.sanitizer is not None:
            self._check_batch(self.sanitizer, output, batch)
        return batch

    def _check_batch(self, sanitizer: Sanitizer, output: SchedulerOutput, batch: Batch) -> None:
        """What kernels are given is what the messages say."""
        for group, given in zip(self.cache.config.kv_cache_groups, batch.groups, strict=True):
            if not group.spec.content.per_request:
                tables = given.block_table_host[:, :: group.ratio] // group.ratio
                sanitizer.check_batch(output, group.index, tables, given.slot_mapping_T.cpu().numpy())

    def _forward(self, output: SchedulerOutput, batch: Batch) -> torch.Tensor:
        """Logits float32 [n, V] of the rows that `_wanted` names, in their order."""
        device = self.cache.device
        return self.model.forward(
            uploaded(output.token_ids.tolist(), device),
            self.cache.positions_T[: batch.num_tokens],
            uploaded(self._wanted(output), device),
            self.context,
        )

    def _locate(self, output: SchedulerOutput, batch: Batch, wrong: Sequence[int]) -> tuple[NotFinite, ...]:
        """Where each of these rows first stops being finite: the step runs again, with every layer looked at.

        The second run writes the same keys and values into the same slots. It costs a step, and only a faulty one.
        """
        ends = output.counts.cumsum().tolist()
        spans = {row: slice(ends[row] - int(output.counts[row]), ends[row]) for row in wrong}
        with self.cache.context.watch(spans) as found:
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
