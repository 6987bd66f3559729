"""Rows of `kvcore bench`: what took how long, as a share of the bandwidth limit and beside the peers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kvcore.testing.bench.peers import NAMES, Call, peers
from kvcore.testing.bench.problem import Problem, Shape
from kvcore.testing.bench.timing import interleaved
from kvcore.testing.cases.planning import Target

Row = dict[str, Any]


def attention_rows(
    shape: Shape, targets: Sequence[Target], bandwidth: float, rounds: int, names: Collection[str] = NAMES
) -> list[Row]:
    """Attention of one shape on several backends, each beside the others and the peers, timed in the same rounds."""
    problems = {str(t.spec.name): Problem(shape, t) for t in targets}
    others = peers(next(iter(problems.values())), names)
    ours = {name: problem.attend for name, problem in problems.items()}
    rows = _beside("attention", shape, targets, ours, others.calls, bandwidth, rounds, shape.read_bytes())
    for row in rows:
        row["tflops"] = shape.flops() / row["ms"] / 1e9
        row["peers_failed"] |= others.failed
    return rows


def write_rows(shape: Shape, targets: Sequence[Target], bandwidth: float, rounds: int) -> list[Row]:
    """The cache write of one shape on several backends, each beside the others and torch's indexed store."""
    problems = {str(t.spec.name): Problem(shape, t) for t in targets}
    ours = {name: problem.write for name, problem in problems.items()}
    others = {} if shape.quant is not None else {"index_put": _index_put(next(iter(problems.values())))}
    return _beside("write", shape, targets, ours, others, bandwidth, rounds, shape.written_bytes())


def _beside(
    what: str,
    shape: Shape,
    targets: Sequence[Target],
    ours: Mapping[str, Call],
    others: Mapping[str, Call],
    bandwidth: float,
    rounds: int,
    nbytes: int,
) -> list[Row]:
    """A row a backend; a library that is a peer and one that is behind a backend may have one name."""
    calls = {f"backend {name}": call for name, call in ours.items()} | dict(others)
    seconds = interleaved(calls, rounds, targets[0].device)
    rows = []
    for target in targets:
        me = f"backend {target.spec.name}"
        row = _row(what, shape, target, seconds[me], nbytes, bandwidth)
        row["peers"] = {n: {"ms": 1e3 * t, "ratio": t / seconds[me]} for n, t in seconds.items() if n != me}
        rows.append(row)
    return rows


def _index_put(problem: Problem) -> Any:
    shape = problem.shape
    slots = problem.batch.groups[0].slot_mapping_T
    blocks = int(slots.max()) + 1
    fields = [x.new_empty(blocks, shape.kv_heads, shape.head_dim) for x in problem.fresh.values()]

    def call() -> None:
        for field, values in zip(fields, problem.fresh.values(), strict=True):
            field[slots] = values

    return call


def _row(what: str, shape: Shape, target: Target, seconds: float, nbytes: int, bandwidth: float) -> Row:
    limit = nbytes / bandwidth
    return {
        "what": what,
        "backend": str(target.spec.name),
        "phase": shape.phase,
        **asdict(shape),
        "cache_dtype": shape.stored,
        "ms": 1e3 * seconds,
        "bytes": nbytes,
        "gb_per_s": nbytes / seconds / 1e9,
        "of_bandwidth": limit / seconds,
        "peers_failed": {},
    }


def table(rows: Iterable[Row]) -> str:
    """The rows for people; below them, why a peer is missing."""
    failed: dict[str, int] = {}
    lines = [
        f"{'what':10}{'backend':12}{'phase':9}{'batch':>6}{'context':>9}{'heads':>8}  {'cache':22}"
        f"{'ms':>10}{'GB/s':>8}{'of limit':>10}  peers"
    ]
    for r in rows:
        cache = r["cache_dtype"] + (f"/{r['quant']}" if r["quant"] else "")
        heads = f"{r['heads']}/{r['kv_heads']}"
        others = ", ".join(f"{n} {p['ratio']:.2f}x our time" for n, p in r["peers"].items())
        lines.append(
            f"{r['what']:10}{r['backend']:12}{r['phase']:9}{r['batch']:>6}{r['context']:>9}"
            f"{heads:>8}  {cache:22}{r['ms']:>10.3f}{r['gb_per_s']:>8.1f}"
            f"{r['of_bandwidth']:>10.1%}  {others}"
        )
        for name, why in r["peers_failed"].items():
            line = f"{name} failed: {why.splitlines()[0]}"
            failed[line] = failed.get(line, 0) + 1
    lines += [f"{line} ({count} rows)" for line, count in failed.items()]
    return "\n".join(lines)


def small_shapes(what: str, dtype: str) -> Sequence[Shape]:
    """Shapes that take seconds on a CPU."""
    base: dict[str, Any] = {"heads": 16, "kv_heads": 4, "head_dim": 64, "dtype": dtype}
    quantized: dict[str, Any] = {"cache_dtype": "int8", "quant": "token_head"}
    if what == "write":
        return [Shape(8, 512, **base), Shape(4, 256, 256, **base), Shape(4, 256, 256, **base, **quantized)]
    return [
        Shape(1, 1024, **base),
        Shape(8, 1024, **base),
        Shape(8, 1024, **base, **quantized),
        Shape(2, 512, 512, **base),
        Shape(2, 1024, 128, **base),
    ]


def large_shapes(what: str, dtype: str) -> Sequence[Shape]:
    """Shapes for a GPU: decode of 1 to 256 sequences, 1k to 128k tokens, groups of 4 and 8, three formats."""
    formats: tuple[dict[str, Any], ...] = (
        {},
        {"cache_dtype": "fp8_e4m3", "quant": "tensor"},
        {"cache_dtype": "int8", "quant": "token_head"},
    )
    if what == "write":
        return [Shape(b, max(n, 16), n, dtype=dtype, **f) for b, n in ((64, 1), (256, 1), (4, 2048)) for f in formats]
    sizes = ((1, 1024), (1, 16384), (1, 131072), (16, 4096), (64, 4096), (256, 1024), (256, 4096))
    found = [Shape(b, n, heads=h, kv_heads=8, dtype=dtype, **f) for b, n in sizes for h in (32, 64) for f in formats]
    whole = ((4, 2048, 2048), (1, 16384, 16384), (4, 8192, 1024))
    return [*found, *(Shape(*sizes_of, dtype=dtype, **f) for sizes_of in whole for f in formats)]
