"""`Worker`: one rank. It loads the model, measures memory, and takes its own config from the plan."""

from __future__ import annotations

import torch

from kvcore.errors import ConfigError
from kvcore.models.forward_context import ZeroContext
from kvcore.models.transformers_bridge import TransformersModel
from kvcore.plan.config import KVCacheConfig
from kvcore.registry.registry import Registry
from kvcore.worker.messages import SchedulerOutput, StepResult
from kvcore.worker.model_runner import LogitsSink, ModelRunner, SampleTokens
from kvcore.worker.paged_cache import PagedCache
from kvcore.worker.profile import cache_bytes, cuda_snapshot, profile
from kvcore.worker.sanitizer import Sanitizer
from kvcore.worker.settings import EngineSettings


class Worker:
    """One rank on one device.

    Args:
        settings: What to load and where.
        registry: Installed plugins, for the backends.
        sample: Draws tokens from logits.
        logits_sink: Where kept logits go.
        global_rank: Rank over the cluster.
        local_rank: Rank on this machine: the device's index.

    Attributes:
        device: ``cpu``, or ``cuda:<local rank>`` (torch calls ROCm devices cuda as well).
    """

    def __init__(
        self,
        settings: EngineSettings,
        registry: Registry,
        sample: SampleTokens,
        logits_sink: LogitsSink | None = None,
        *,
        global_rank: int = 0,
        local_rank: int = 0,
    ) -> None:
        self.settings = settings
        self.registry = registry
        self.sample = sample
        self.logits_sink = logits_sink
        self.global_rank = global_rank
        self.device = torch.device("cpu" if settings.device.kind == "cpu" else f"cuda:{local_rank}")

    def load_model(self) -> None:
        """Load the weights, with readings before and after on a device that has them."""
        s = self.settings
        if s.model_path is None:
            raise ConfigError(
                "a model directory with weights is needed to run",
                field="model.path",
                got=None,
                remedy="give model.path=DIR",
            )
        self._readings = [] if s.device.kind == "cpu" else [cuda_snapshot(self.device)]
        self.model = TransformersModel.load(s.model_path, s.facts, dtype=s.facts.dtype, device=self.device)
        if self._readings:
            self._readings.append(cuda_snapshot(self.device))

    def cache_bytes(self) -> int:
        """Bytes for the arena by the memory profile: total x utilization less everything else in use."""
        if not self._readings:
            raise ConfigError(
                "a CPU device has no memory profile",
                field="cache.memory",
                got="auto",
                remedy="give cache.memory or cache.num_blocks",
            )
        torch.cuda.reset_peak_memory_stats(self.device)
        self._largest_step()
        torch.cuda.synchronize(self.device)
        before, loaded = self._readings
        use = profile(before, loaded, cuda_snapshot(self.device))
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info(self.device)
        return cache_bytes(total, self.settings.cache.utilization, use)

    @torch.inference_mode()
    def _largest_step(self) -> None:
        """The step of most tokens, with attention left out: there is no cache yet."""
        limits = self.settings.engine
        tokens = torch.zeros(limits.max_num_batched_tokens, dtype=torch.int64, device=self.device)
        rows = torch.arange(min(limits.max_num_seqs, len(tokens)), device=self.device)
        self.model.forward(tokens, torch.zeros_like(tokens), rows, ZeroContext())

    def initialize(self, config: KVCacheConfig) -> None:
        """Allocate the arena, make the views and bind every layer."""
        self.runner = self.make_runner(config)

    def make_runner(self, config: KVCacheConfig) -> ModelRunner:
        """A runner of the loaded model on an arena of its own, with the backends that `config` names."""
        s = self.settings
        cache = PagedCache(
            config,
            s.facts.queries,
            s.engine,
            self.registry,
            device=self.device,
            options=s.backend.options,
            parameters=self.model.attention_tensors,
            sanitize=s.cache.sanitize,
        )
        sanitizer = Sanitizer(config) if s.cache.sanitize else None
        return ModelRunner(self.model, cache, self.sample, self.logits_sink, sanitizer)

    def execute(self, output: SchedulerOutput) -> StepResult:
        """Run one step."""
        return self.runner.execute(output)
