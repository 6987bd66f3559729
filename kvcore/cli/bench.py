"""`kvcore bench what=attention|write`: ratios against the bandwidth limit and importable peers."""

# ruff: noqa: RUF009  (`key` makes a dataclass field)
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from kvcore.cli.commands import Command, backends_as_list
from kvcore.cli.result import Job, Result
from kvcore.config.schema import DeviceRoot, node
from kvcore.errors import BackendUnsupportedError, ConfigError, NotBuiltError
from kvcore.settings.cache import DTYPES
from kvcore.settings.key import check, key

ROUNDS = {"cpu": 5, "cuda": 20}
BUILT, UNBUILT = ("attention", "write"), ("cache", "engine")


@dataclass(frozen=True)
class ModelKeys:
    """The model that the shapes stand for."""

    dtype: str = key("auto", "dtype of queries; auto: bfloat16 on a GPU, else float32", choices=DTYPES)

    def __post_init__(self) -> None:
        check(self, "model")


@dataclass(frozen=True)
class Keys(DeviceRoot):
    """Backends, and what is measured of them."""

    backend: tuple[str, ...] = key(("auto",), "the backend that is measured, or A,B: each beside the others")
    model: ModelKeys = node(ModelKeys)
    what: str | None = key(None, "what is measured: attention or write")


COMMAND = Command(
    "bench",
    "ratios against named baselines",
    Keys,
    usage="what=attention|write [backend=NAME | backend=A,B] [KEY=VALUE ...] [-m]",
    rewrite=backends_as_list,
)


def execute(job: Job[Keys]) -> Result:
    """Measure on the device of this machine.

    Raises:
        ConfigError: `what` is missing, or the device is not here.
        NotBuiltError: `what` is a benchmark that does not exist yet.
    """
    from kvcore.cli.progress import Display
    from kvcore.config.build import device_of

    config = job.composed.config
    what = config.what
    if what not in BUILT:
        kind = NotBuiltError if what in UNBUILT else ConfigError
        raise kind(
            f"bench what={what} is not built yet" if what in UNBUILT else "bench needs to know what to measure",
            field="what",
            got=what,
            allowed=BUILT,
            remedy="use what=attention or what=write",
        )
    facts = device_of(job.composed, present=True)
    with Display() as display:
        display.stage("importing torch")
        from kvcore.testing.bench.rows import attention_rows, large_shapes, small_shapes, table, write_rows
        from kvcore.testing.bench.timing import copy_bandwidth

        targets = [_target(job, facts, name) for name in config.backend]
        device = targets[0].device
        bandwidth = copy_bandwidth(device, 1 << (30 if device == "cuda" else 27))
        dtype = config.model.dtype if config.model.dtype != "auto" else _dtype(device)
        shapes = (large_shapes if device == "cuda" else small_shapes)(what, dtype)
        measure = attention_rows if what == "attention" else write_rows
        rows: list[dict[str, Any]] = []
        for i, shape in enumerate(shapes):
            display.stage(f"{what} {i + 1} of {len(shapes)}")
            able = [t for t in targets if t.spec.unsupported(shape.attention_query(), t.options) is None]
            if able:
                rows += measure(shape, able, bandwidth, ROUNDS["cuda" if device == "cuda" else "cpu"])
    document = {
        "what": what,
        "device": facts.name or facts.kind,
        "proof": ", ".join(dict.fromkeys(t.spec.proof(t.options, facts) for t in targets)),
        "copy_gb_per_s": bandwidth / 1e9,
        "rows": rows,
    }
    text = f"copy bandwidth {bandwidth / 1e9:.1f} GB/s on {document['device']}\n{table(rows)}"
    return Result(document, text)


def _dtype(device: str) -> str:
    return "bfloat16" if device == "cuda" else "float32"


def _target(job: Job[Keys], facts: Any, backend: str) -> Any:
    """The backend asked for; `auto` takes the first by priority that runs here without a stand-in."""
    from kvcore.testing.cases.base import switch_on
    from kvcore.testing.cases.planning import Target

    config, registry = job.composed.config, job.registry
    names = [backend]
    if backend == "auto":
        rank = {n: s.priority.get(facts.kind, 0) for n, s in registry.backends.items()}
        names = sorted(registry.backends, key=lambda n: (-rank[n], n))
    reasons: dict[str, str] = {}
    for name in names:
        spec = registry.backend(name)
        target: Target
        target, missing = switch_on(spec, config.backends.get(name, spec.Config()), facts)
        chosen = target.options == config.backends.get(name, spec.Config())
        if missing is None and (chosen or backend != "auto"):
            return target
        reasons[name] = missing or "only with a stand-in for the device"
    raise BackendUnsupportedError(
        "no backend can be measured here",
        field="backend",
        got=backend,
        allowed=reasons,
        remedy="choose another backend, such as backend=torch",
    )
