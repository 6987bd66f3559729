"""`kvcore conform`: the conformance kit over one backend, several, or all."""

# ruff: noqa: RUF009  (`key` makes a dataclass field)
from __future__ import annotations

import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING

from kvcore.cli.commands import Command, backends_as_list
from kvcore.cli.result import DONE, NO, Job, Result
from kvcore.config.schema import DeviceRoot, node
from kvcore.errors import ConfigError
from kvcore.models.stored_as import known_kind
from kvcore.settings.key import key
from kvcore.testing.cases.case import SIZES

if TYPE_CHECKING:
    from kvcore.testing.cases.outcome import CellResult


@dataclass(frozen=True)
class WhereKeys:
    """Which cases of the conformance kit run: those that have every value given here."""

    profile: str | None = key(None, "core profile: kv, latent, encoder, or none")
    content: str | None = key(None, "kv or latent")
    head_dim: str | None = key(None, "dimension of queries and keys")
    head_dim_v: str | None = key(None, "dimension of values")
    gqa: str | None = key(None, "query heads a KV head, or all")
    block_size: str | None = key(None, "tokens of a block")
    kernel_ratio: str | None = key(None, "kernel blocks in a block")
    dtype: str | None = key(None, "element type of queries")
    cache_dtype: str | None = key(None, "element type of the cache, or TYPE/GRANULARITY")
    mask: str | None = key(None, "causal, window, chunk, bidirectional or bidirectional+window")
    window: str | None = key(None, "tokens, or none, 1, P-1, P, P+1, long around a block of P tokens")
    sinks: str | None = key(None, "true or false")
    softcap: str | None = key(None, "the cap, or none")
    alibi: str | None = key(None, "true or false")
    phase: str | None = key(None, "prefill, chunked, decode, multi_token, mixed, prefix_hit, ...")
    options: str | None = key(None, "given, or the options that a case changes, such as layout=hnd")
    context: str | None = key(
        None, "tokens of the longest sequence: 1-256, 257-512, 513-1024, 1025-4096, 4097-32768 or 32769+"
    )
    rows: str | None = key(None, "most tokens of one sequence in the step: 1, 2-64, 65-256 or 257+")
    tokens: str | None = key(None, "tokens of the step: 1-128, 129-1024 or 1025+")
    sequences: str | None = key(None, "sequences of the step: 1-8, 9-32, 33-128, 129-256 or 257+")
    blocks: str | None = key(None, "kernel blocks of the longest sequence: 1-64, 65-128 or 129+")
    heads: str | None = key(None, "query heads: 1-16, 17-39, 40-63, 64-127 or 128+")
    kv_heads: str | None = key(None, "KV heads: 1-3, 4-7, 8-31, 32-63 or 64+")


@dataclass(frozen=True)
class ContentKeys:
    """What the cases store keys and values in."""

    content: str = key("auto", "a plugin's content, which is then what is proven; auto: plain keys and values")


@dataclass(frozen=True)
class Keys(DeviceRoot):
    """Backends, and the cases that they are asked."""

    backend: tuple[str, ...] = key(("all",), "NAME, A,B or all")
    level: str = key("quick", "how many cases run: fast takes seconds, full minutes", choices=SIZES)
    cases: str = key(
        "auto",
        "auto: of backends that are interpreted or emulated a covering set chosen by cost",
        choices=("auto", "all"),
    )
    jobs: int = key(1, "processes that run cases; each has an instance of the backend of its own", least=1, most=256)
    slowest: int = key(0, "how many of the slowest cases are listed", least=0)
    cache: ContentKeys = node(ContentKeys)
    where: WhereKeys = node(WhereKeys)
    html: str | None = key(None, "file for the cross-backend matrix, as one HTML page")


COMMAND = Command(
    "conform",
    "the conformance kit: proves attention backends right, case by case",
    Keys,
    usage="[backend=NAME | backend=A,B | backend=all] [KEY=VALUE ...] [-m]",
    rewrite=backends_as_list,
)


def execute(job: Job[Keys]) -> Result:
    """Run; status 1 when a case failed."""
    from kvcore.config.build import device_of
    from kvcore.testing.report.conform import conform  # late: loads torch when it runs
    from kvcore.testing.report.html import page
    from kvcore.testing.report.table import text

    config = job.composed.config
    facts = device_of(job.composed, present=True)
    where = {f.name: getattr(config.where, f.name) for f in fields(config.where)}
    progress = _Progress()
    done = conform(
        "all" if config.backend in (("all",), ("auto",)) else list(config.backend),
        level=config.level,
        where={axis: value for axis, value in where.items() if value is not None},
        options=config.backends,
        facts=facts,
        registry=job.registry,
        content=known_kind("cache.content", config.cache.content, job.registry.contents),
        cover_slow=config.cases == "auto",
        jobs=config.jobs,
        report=progress.show,
    )
    progress.end()
    if config.html is not None:
        _write(config.html, page(done))
    return Result(done.as_dict(), text(done, slowest=config.slowest), NO if done.failed else DONE)


def _write(path: str, content: str) -> None:
    try:
        Path(path).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"the page cannot be written: {error.strerror}",
            field="html",
            got=path,
            allowed="a file in an existing folder",
        ) from error


class _Progress:
    """One line on standard error that says where the run is; nothing where nobody watches."""

    def __init__(self) -> None:
        self._watched = sys.stderr.isatty()
        self._count = 0

    def show(self, result: CellResult) -> None:
        """Count one result."""
        self._count += 1
        if self._watched and self._count % 5 == 0:
            line = f"{self._count} cases, {result.backend} {result.case.id}"
            print(f"\r\x1b[2K{line[:100]}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._watched:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
