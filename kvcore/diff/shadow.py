"""A second set of backends that sees every step of a worker: same model, same queries, an arena of its own.

Both sides write the same keys and values, each by its own kernel into its own layout, and answer the same
queries. The model goes on with the first side's answer, so that the second is judged layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kvcore.attention.batch import Batch
from kvcore.diff.divergence import Divergence, OutputRow, as_array
from kvcore.errors import BackendError, KVCoreError
from kvcore.models.facts import ModelFacts
from kvcore.models.forward_context import ForwardContext
from kvcore.plan.config import KVCacheConfig
from kvcore.spec.cache_spec import CacheId
from kvcore.testing.oracle.attention import Array
from kvcore.testing.oracle.tolerance import upper_bound
from kvcore.worker.bound_attention import BoundLayer
from kvcore.worker.forward_context import StepContext
from kvcore.worker.messages import SchedulerOutput, StepResult
from kvcore.worker.model_runner import ModelRunner
from kvcore.worker.worker import Worker

# From the id of a request to the number of its prompt.
Numbering = Callable[[str], int]


def add_shadow(worker: Worker, config: KVCacheConfig, numbering: Numbering) -> Divergence:
    """From now on every step also runs through the backends that `config` names.

    Args:
        worker: A worker that is initialized.
        config: A plan with the same groups and blocks as the worker's own.
        numbering: Names the sequences in what is found.

    Returns:
        What is found, step by step.
    """
    runner = ShadowedRunner(worker.runner, worker.make_runner(config), numbering)
    worker.runner = runner  # type: ignore[assignment]
    return runner.divergence


class ShadowedRunner:
    """Stands in for a `ModelRunner`.

    Args:
        first: The worker's own runner.
        second: The runner whose backends are judged.
        numbering: Names the sequences.
    """

    def __init__(self, first: ModelRunner, second: ModelRunner, numbering: Numbering) -> None:
        self.first, self.second = first, second
        self.numbering = numbering
        self.divergence = Divergence()
        self._bounds = Bounds(first.model.facts)
        self._output = SchedulerOutput(0)
        first.context = ShadowedContext(first.cache.context, second.cache.context, self._look)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step through both."""
        self._output = output
        self.second.stage(output)
        return self.first.execute(output)

    def _look(self, bound: BoundLayer, batch: Batch, inputs: Inputs, a: torch.Tensor, b: torch.Tensor) -> None:
        cache_id = bound.layer.cache_id
        tolerance = self._bounds.tolerance(bound, batch, inputs, a)
        starts = batch.query_start_loc_host

        def locate(row: int, head: int) -> OutputRow:
            s = int((starts[1:] <= row).sum())
            token = int(batch.num_computed_host[s]) + row - int(starts[s])
            sequence = self.numbering(self.first.texts.name(int(self._output.rows[s])))
            return OutputRow(cache_id.layer, token, head, sequence, self._output.step)

        self.divergence.take(as_array(a), as_array(b), tolerance, locate)


Inputs = Mapping[str, torch.Tensor]


class Bounds:
    """How far two right answers can lie apart, from the norms of what was cached so far.

    The kit's formula (`kvcore.testing.oracle.tolerance`) with upper bounds in place of the exact magnitudes:
    ``sum_d |q_d k_d| <= |q| max_j |k_j|`` and ``sum_j p_j |v_j| <= max_j |v_j|``, over all keys that a layer
    has seen. Each side may err by it.

    Args:
        facts: The model; says which layers share a cache.
    """

    def __init__(self, facts: ModelFacts) -> None:
        self._owner = facts.shared
        self._keys: dict[CacheId, torch.Tensor] = {}
        self._values: dict[CacheId, torch.Tensor] = {}

    def tolerance(self, bound: BoundLayer, batch: Batch, inputs: Inputs, out_THV: torch.Tensor) -> Array:
        """Allowed difference of each output, [T, H, Dv]."""
        layer, query = bound.layer, bound.layer.query
        owner = self._owner.get(layer.cache_id, layer.cache_id)
        key_K = self._most(self._keys, owner, inputs["k"].double().norm(dim=-1))
        value_K = self._most(self._values, owner, inputs["v"].double().abs().amax(dim=-1))
        norms_TH = inputs["q"].double().norm(dim=-1)
        per_head = query.group_size
        score_TH = abs(query.softmax_scale) * norms_TH * key_K.repeat_interleave(per_head)
        bias_TH = torch.zeros_like(score_TH)
        if layer.alibi_slopes is not None:
            bias_TH += layer.alibi_slopes.double() * batch.max_seq_len
        weight_THV = value_K.repeat_interleave(per_head)[:, None].expand(*out_THV.shape)
        out, score, bias, weight = (as_array(t) for t in (out_THV, score_TH, bias_TH, weight_THV))
        return 2 * upper_bound(out, score, bias, weight, query.dtype, query.head_dim, batch.max_seq_len)

    @staticmethod
    def _most(seen: dict[CacheId, torch.Tensor], owner: CacheId, sizes_TK: torch.Tensor) -> torch.Tensor:
        most_K = sizes_TK.amax(dim=0)
        seen[owner] = torch.maximum(seen[owner], most_K) if owner in seen else most_K
        return seen[owner]


class ShadowedContext(ForwardContext):
    """Asks both sides, tells what they answered, and goes on with the first.

    Args:
        first: The context of the worker's own runner.
        second: The context of the other.
        look: Called for every layer with both answers.
    """

    def __init__(
        self,
        first: StepContext,
        second: StepContext,
        look: Callable[[BoundLayer, Batch, Inputs, torch.Tensor, torch.Tensor], None],
    ) -> None:
        self.first, self.second, self.look = first, second, look

    def attend(
        self,
        cache_id: CacheId,
        query_THD: torch.Tensor,
        key_TKD: torch.Tensor,
        value_TKDv: torch.Tensor,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The first side's answer; see `ForwardContext`."""
        inputs = {"q": query_THD, "k": key_TKD, "v": value_TKDv}
        a, b = (self._answer(side, cache_id, inputs, sinks) for side in (self.first, self.second))
        attention = self.first.attention
        self.look(attention.layers[cache_id], attention.batch, inputs, a, b)
        return a

    @staticmethod
    def _answer(side: StepContext, cache_id: CacheId, inputs: Inputs, sinks: torch.Tensor | None) -> torch.Tensor:
        """One side's answer; what its kernels raise names the backend and the layer."""
        try:
            return side.attend(cache_id, inputs["q"], inputs["k"], inputs["v"], sinks=sinks)
        except KVCoreError:
            raise
        except Exception as error:
            name = type(side.attention.layers[cache_id].backend).__name__
            raise BackendError(
                f"{name} raised in layer {cache_id.layer}: {type(error).__name__}: {error}",
                field="backend",
                got=name,
                remedy="`kvcore conform` finds the smallest case that does so",
            ) from error
