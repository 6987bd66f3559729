"""FlashAttention and FlashInfer on a GPU: the conformance kit, and attention's speed beside Triton.

    python tests/gpu/flash_device.py [--level quick] [--out results.json]

Prints a table and writes JSON. Backends that are not installed are left out, with the reason. Times are the
median of calls between device events, after a warm-up; the cache is bfloat16, the blocks are scattered.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch

from kvcore.attention.backend import AttentionBackend, AttentionGroup, AttentionLayer
from kvcore.attention.batch import Batch
from kvcore.attention.declaration import BackendSpec
from kvcore.attention.query import AttentionQuery, Mask
from kvcore.memory.arena import Arena
from kvcore.memory.batch_builder import BatchBuilder
from kvcore.memory.block_table import BlockTables
from kvcore.memory.views import field_tensors
from kvcore.plan.capacity import Limits
from kvcore.plan.groups import LayoutOffer
from kvcore.plan.planner import Budget, plan
from kvcore.registry.loader import installed
from kvcore.spec.cache_spec import CacheId, KVCacheSpec
from kvcore.spec.content import KVHeads
from kvcore.spec.retention import Full
from kvcore.testing import run
from kvcore.testing.cases.base import here, switch_on

NAMES = ("flash_attn", "flashinfer", "triton")
CACHE = CacheId(0)
ROUNDS, WARM = 20, 3


class Shape(NamedTuple):
    """One step.

    Attributes:
        seqs: Sequences.
        length: Tokens of each after the step.
        scheduled: Of these, the step's own.
        heads, kv_heads, dim: The layer.
        window: Its window, or None.
    """

    seqs: int
    length: int
    scheduled: int
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    window: int | None = None


SHAPES = {
    "decode 8 x 4096": Shape(8, 4096, 1),
    "decode 64 x 4096": Shape(64, 4096, 1),
    "decode 1 x 65536": Shape(1, 65536, 1),
    "decode 64 x 4096, window 1024": Shape(64, 4096, 1, window=1024),
    "prefill 4 x 4096": Shape(4, 4096, 4096),
    "chunk 4 x 512 of 8192": Shape(4, 8192, 512),
}


class Step(NamedTuple):
    """A step, ready to run."""

    backend: AttentionBackend
    batch: Batch
    group: AttentionGroup
    cache: Any
    q: torch.Tensor
    out: torch.Tensor

    def attend(self, metadata: Any) -> None:
        """The layer."""
        layer = self.group.layers[0]
        self.backend.attend(layer, {"q": self.q}, self.cache, metadata, self.out)


def make_step(spec: type[BackendSpec], options: Any, shape: Shape, dtype: str, block_size: int) -> Step:
    """The backend over a cache of random numbers, with scattered blocks."""
    facts = here()
    device = "cuda" if facts.kind == "cuda" else "cpu"
    content = KVHeads(shape.kv_heads, shape.dim, dtype=dtype)
    cache_spec = KVCacheSpec(content, Full())
    query = AttentionQuery(
        "kv", dtype, dtype, shape.heads, shape.kv_heads, shape.dim, shape.dim, Mask(window=shape.window)
    )
    per_seq = -(-shape.length // block_size)
    offer = LayoutOffer(spec.name, tuple(spec.layouts(cache_spec, facts, options)), spec.max_offset_bits)
    limits = Limits(shape.length, shape.seqs * shape.scheduled, shape.seqs)
    budget = Budget(num_blocks=shape.seqs * per_seq + 1)
    config = plan({CACHE: cache_spec}, {CACHE: offer}, budget, limits, block_size=block_size).configs[0]
    arena = Arena(config.total_bytes, device)
    views = field_tensors(arena, config, CACHE)
    for view in views.values():
        view.normal_()
    ids = list(range(1, shape.seqs * per_seq + 1))
    random.Random(0).shuffle(ids)
    tables = BlockTables(config, shape.seqs, shape.length, device)
    for row in range(shape.seqs):
        mine = ids[row * per_seq : (row + 1) * per_seq]
        tables.apply(0, row, SimpleNamespace(drop_front=0, keep=0, ids=mine))
    builder = BatchBuilder(config, shape.seqs, shape.seqs * shape.scheduled, device)
    computed = [shape.length - shape.scheduled] * shape.seqs
    batch = builder.build(list(range(shape.seqs)), [shape.scheduled] * shape.seqs, computed, tables)
    layer = AttentionLayer(CACHE, query, shared=True)
    group = AttentionGroup(0, query, (layer,), config.kv_cache_groups[0].layout)
    q = torch.randn(shape.seqs * shape.scheduled, shape.heads, shape.dim, device=device).to(views["k"].dtype)
    return Step(spec.create(device, options), batch, group, views, q, torch.empty_like(q))


def median_ms(action: Callable[[], object], rounds: int = ROUNDS) -> float:
    """Median time of a call in milliseconds, the device waited for."""
    times = []
    for i in range(WARM + rounds):
        begun = time.perf_counter()
        action()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if i >= WARM:
            times.append(1000 * (time.perf_counter() - begun))
    return statistics.median(times)


def speed(name: str, shapes: dict[str, Shape], dtype: str = "bfloat16", rounds: int = ROUNDS) -> dict[str, Any]:
    """Milliseconds to prepare a step and to attend one layer, for each shape."""
    spec = installed().backends[name]
    target, missing = switch_on(spec, spec.Config(), here())
    if missing is not None:
        return {"missing": missing}
    found: dict[str, Any] = {"proof": spec.proof(target.options, target.facts)}
    for label, shape in shapes.items():
        step = make_step(spec, target.options, shape, dtype, 256)
        metadata = step.backend.prepare(step.batch, step.group)
        found[label] = {
            "prepare_ms": median_ms(lambda s=step: s.backend.prepare(s.batch, s.group), rounds),
            "attend_ms": median_ms(lambda s=step, m=metadata: s.attend(m), rounds),
        }
    return found


def conformance(name: str, level: str) -> dict[str, Any]:
    """Counts of the kit's outcomes, by proof level, and what failed."""
    results = run(name, level=level)
    return {
        "outcomes": {f"{o} ({r})": n for (o, r), n in Counter((x.outcome, x.proof) for x in results).items()},
        "failed": {x.case.id: x.reason for x in results if x.outcome == "failed"},
    }


def main() -> int:
    """0 unless a case of the kit failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--level", default="quick", choices=("quick", "full"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    with torch.inference_mode():
        document = {
            "torch": torch.__version__,
            "device": here().name,
            "conformance": {name: conformance(name, given.level) for name in NAMES[:2]},
            "speed": {name: speed(name, SHAPES) for name in NAMES},
        }
    print(json.dumps(document, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(document, indent=1))
    return int(any(c["failed"] for c in document["conformance"].values()))


if __name__ == "__main__":
    raise SystemExit(main())
