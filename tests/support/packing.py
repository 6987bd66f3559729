"""Arenas filled to the last token and churned by the real manager, and how many of their bytes are then of use."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
from helpers.cache_facts import config_of, fact_files

from kvcore.manage.manager import KVCacheManager
from kvcore.models.families import model_facts
from kvcore.plan.capacity import Limits
from kvcore.plan.planner import Budget, plan
from kvcore.settings.cache import CacheSettings
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import Content, KVHeads, Quant, State
from kvcore.spec.retention import Full, Latest, Retention, Window

Caches = dict[CacheId, KVCacheSpec]
BUDGET = 2048  # tokens of a step
CONFIGS = Path(__file__).parents[1] / "data" / "hf_configs"


def heads(count: int, dim: int, dtype: str = "bfloat16") -> KVHeads:
    return KVHeads(count, dim, dtype=dtype, quant=None if dtype == "bfloat16" else Quant("tensor"))


def layers(*kinds: tuple[int, Content, Retention]) -> Caches:
    specs = [KVCacheSpec(content, retention) for count, content, retention in kinds for _ in range(count)]
    return {CacheId(i): s for i, s in enumerate(specs)}


def _config(name: str, dtype: str) -> Caches:
    (path,) = CONFIGS.glob(f"*{name}_config.json")
    return dict(model_facts(json.loads(path.read_text()), dtype="bfloat16", cache=CacheSettings(dtype=dtype)).owned)


def _zamba2(dtype: str) -> Caches:
    facts = next(f for f in fact_files() if f["name"] == "zamba2-2.7b")
    return dict(model_facts(config_of(facts), dtype="bfloat16", cache=CacheSettings(dtype=dtype)).owned)


def _mamba2(dtype: str) -> Caches:
    """4 attention layers beside 36 of 128 heads of 64, state 128, 1 group, convolution of 4."""
    state = State(("conv", "ssm"), ((3, 128 * 64 + 2 * 128), (128, 64, 128)), ("bfloat16", "bfloat16"))
    return layers((4, heads(8, 128, dtype), Full()), (36, state, Latest()))


def attention_shapes() -> dict[str, Caches]:
    wide = heads(8, 128)
    return {
        "10 full + 52 window 1024": layers((10, heads(16, 128), Full()), (52, heads(16, 128), Window(1024))),
        "12 full + 12 window 128": layers((12, heads(8, 64), Full()), (12, heads(8, 64), Window(128))),
        "20 full + 30 window 4096": layers((20, wide, Full()), (30, wide, Window(4096))),
        "11 full + 25 window 4096": layers((11, wide, Full()), (25, wide, Window(4096))),
        "13 full + 31 window 512": layers((13, wide, Full()), (31, wide, Window(512))),
        "8 full, 1 of 512 + 40 window 1024": layers((8, heads(1, 512), Full()), (40, heads(8, 256), Window(1024))),
    }


def hybrid_shapes(dtype: str) -> dict[str, Caches]:
    return {
        f"Qwen3.5-122B {dtype}": _config("Qwen3.5-122B-A10B-NVFP4", dtype),
        f"Nemotron-3-Nano {dtype}": _config("NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", dtype),
        f"Zamba2-2.7B {dtype}": _zamba2(dtype),
        f"4 attention + 36 Mamba-2 {dtype}": _mamba2(dtype),
    }


def ideal_bytes(caches: Caches, tokens: int) -> int:
    """What one request of so many computed tokens has to keep, and no byte more."""
    total = 0
    for spec in caches.values():
        if isinstance(spec.retention, Latest):
            total += spec.content.bytes_per_request if tokens else 0
        else:
            live = min(tokens, spec.retention.size - 1) if isinstance(spec.retention, Window) else tokens
            total += int(live * spec.bytes_per_token)
    return total


class Packing:
    """An arena with requests of one length.

    Attributes:
        live: Rows and their tokens; at most one is not complete.
    """

    def __init__(
        self, caches: Caches, length: int, memory: int, placement: str = "packed", block_size: int = 16
    ) -> None:
        self.caches, self.length, self.memory = caches, length, memory
        limits = Limits(length, BUDGET)
        self.plan = plan(caches, {}, Budget(memory=memory), limits, placement="packed", block_size=16)
        self.manager = KVCacheManager(self.plan.configs[0], prefix_caching=False)
        self.live: dict[int, int] = {}
        self.random = random.Random(0)
        self._prompt = np.zeros(length, np.int64)

    @property
    def efficiency(self) -> float:
        whole = ideal_bytes(self.caches, self.length)
        used = sum(whole if n == self.length else ideal_bytes(self.caches, n) for n in self.live.values())
        return used / self.memory

    def fill(self) -> None:
        """Prefill one request after the other, until not even one token more can be had."""
        row = next((r for r, n in self.live.items() if n < self.length), None)
        while row is None or self._prefill(row):
            row = self.manager.begin(self._prompt)
        if row not in self.live:
            self.manager.free([row])

    def _prefill(self, row: int) -> bool:
        """Whether the whole of it could be computed; a chunk that is refused is halved."""
        done = self.live.get(row, 0)
        while done < self.length:
            chunk = min(BUDGET, self.length - done)
            step = self.manager.begin_step()
            while chunk and step.try_add(row, chunk):
                chunk //= 2
                step = self.manager.begin_step()
            if not chunk:
                return False
            given = self.manager.allocate(step)
            self.manager.commit(given.step)
            self.manager.retire(given.step)
            done += chunk
            self.live[row] = done
        return True

    def churn(self) -> None:
        """Free a random half of the complete requests, and fill again."""
        complete = sorted(r for r, n in self.live.items() if n == self.length)
        gone = self.random.sample(complete, len(complete) // 2)
        self.manager.free(gone)
        for row in gone:
            del self.live[row]
        self.fill()
