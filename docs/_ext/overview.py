"""The picture of the first page: the way of the bytes, once, and the way of a request, every step.

Each box that names a thing of the code gives its place, and the build imports it: a renamed class stops the build.
"""

from __future__ import annotations

from html import escape
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT = 138, 66  # of a box, in user units
STEP, LEFT = 166, 8  # from box to box, and the margin
ONCE, PLUGIN, STEPS = 44, 176, 308  # upper edges of the three rows


class Box(NamedTuple):
    """A station on the way.

    Attributes:
        where: ``module:name`` in the code, or plain words for what comes from outside.
        does: One or two short lines.
    """

    where: str
    does: tuple[str, ...]

    @property
    def title(self) -> str:
        """The name as the code has it; raises `ImportError` or `AttributeError` when the code has it no more."""
        module, _, name = self.where.partition(":")
        if not name:
            return self.where
        found = getattr(import_module(module), name)
        return f"{name}()" if not isinstance(found, type) else name


BYTES = (
    Box("config.json", ("what the model says", "of its layers")),
    Box("kvcore.spec.cache_spec:KVCacheSpec", ("what a layer stores,", "and for how long")),
    Box("kvcore.plan.planner:plan", ("groups, block size,", "where every byte lies")),
    Box("kvcore.plan.config:KVCacheConfig", ("blocks, groups, tensors", "of one rank")),
    Box("kvcore.memory.arena:Arena", ("one allocation, viewed", "without a copy")),
)
REQUEST = (
    Box("prompt", ("token ids", "of a text")),
    Box("kvcore.engine.scheduler:Scheduler", ("who runs in this step,", "and how many tokens")),
    Box("kvcore.manage.manager:KVCacheManager", ("block ids, prefixes", "found again")),
    Box("kvcore.worker.messages:SchedulerOutput", ("integers alone,", "to every worker")),
    Box("kvcore.attention.batch:Batch", ("block tables", "and slots")),
)
PLUGINS = (
    Box("kvcore.attention.declaration:BackendSpec", ("declares what it serves", "and its layouts")),
    Box("kvcore.attention.backend:AttentionBackend", ("brings its kernels", "")),
)


def _box(box: Box, x: int, y: int, kind: str = "") -> str:
    middle = x + WIDTH // 2
    lines = [f'<text class="title" x="{middle}" y="{y + 22}">{escape(box.title)}</text>']
    lines += [f'<text x="{middle}" y="{y + 40 + 15 * i}">{escape(line)}</text>' for i, line in enumerate(box.does)]
    return f'<rect class="{kind}" x="{x}" y="{y}" width="{WIDTH}" height="{HEIGHT}" rx="6"/>' + "".join(lines)


def _arrow(*points: tuple[int, int]) -> str:
    path = " ".join(f"{'L' if i else 'M'}{x} {y}" for i, (x, y) in enumerate(points))
    return f'<path d="{path}" marker-end="url(#tip)"/>'


def _label(text: str, x: int, y: int) -> str:
    return f'<text class="label" x="{x}" y="{y}">{escape(text)}</text>'


def picture() -> str:
    """The picture as SVG; colours are those of the page, dark or light."""
    parts = []
    for row, y in ((BYTES, ONCE), (REQUEST, STEPS)):
        for i, box in enumerate(row):
            x = LEFT + i * STEP
            parts.append(_box(box, x, y))
            parts.append(_arrow((x + WIDTH, y + HEIGHT // 2), (x + STEP - 2, y + HEIGHT // 2)))
    layer = LEFT + len(BYTES) * STEP
    parts.append(
        f'<rect class="layer" x="{layer}" y="{ONCE}" width="{WIDTH}" height="{STEPS - ONCE + HEIGHT}" rx="6"/>'
    )
    inside = (
        "each layer",
        "",
        "write",
        "keys and values",
        "into their slots",
        "",
        "attend",
        "through the",
        "block table",
    )
    for i, line in enumerate(inside):
        style = ' class="title"' if line in ("each layer", "write", "attend") else ""
        parts.append(f'<text{style} x="{layer + WIDTH // 2}" y="{ONCE + 90 + 20 * i}">{line}</text>')
    declares, kernels = LEFT + 2 * STEP, LEFT + 3 * STEP + STEP // 2
    parts += [_box(PLUGINS[0], declares, PLUGIN, "plugin"), _box(PLUGINS[1], kernels, PLUGIN, "plugin")]
    upwards, across = declares + WIDTH // 2, PLUGIN + HEIGHT // 2
    parts.append(_arrow((upwards, PLUGIN), (upwards, ONCE + HEIGHT + 2)))
    parts.append(_label("layouts", upwards + 6, PLUGIN - 28))
    parts.append(_arrow((declares + WIDTH, across), (kernels - 2, across)))
    parts.append(_label("create", declares + WIDTH + 26, across - 8))
    parts.append(_arrow((kernels + WIDTH, across), (layer - 2, across)))
    parts.append(_label("a plugin: ours or yours", LEFT + STEP, across + 5))
    back, scheduler = STEPS + HEIGHT + 34, LEFT + STEP + WIDTH // 2
    parts.append(
        _arrow(
            (layer + WIDTH // 2, STEPS + HEIGHT),
            (layer + WIDTH // 2, back),
            (scheduler, back),
            (scheduler, STEPS + HEIGHT + 2),
        )
    )
    parts.append(_label("logits, and the sampled tokens", LEFT + 3 * STEP - 20, back - 8))
    parts.append(f'<text class="row" x="{LEFT}" y="{ONCE - 16}">once: the way of the bytes</text>')
    parts.append(f'<text class="row" x="{LEFT}" y="{STEPS - 16}">every step: the way of a request</text>')
    width, height = layer + WIDTH + LEFT, back + 12
    return (
        f'<svg class="overview" viewBox="0 0 {width} {height}" role="img" aria-label="The way of the bytes and of a '
        f'request through kvcore"><style>{STYLE}</style><defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" '
        f'markerWidth="8" markerHeight="8" orient="auto"><path class="tip" d="M0 0 L8 4 L0 8 z"/></marker></defs>'
        f"{''.join(parts)}</svg>"
    )


STYLE = """
.overview{width:100%;height:auto;margin:.5rem 0 1.5rem}
.overview rect{fill:var(--color-background-secondary);stroke:var(--color-foreground-border)}
.overview rect.plugin{stroke:var(--color-brand-primary);stroke-width:2}
.overview rect.layer{stroke:var(--color-foreground-primary)}
.overview text{font-size:12px;text-anchor:middle;fill:var(--color-foreground-secondary)}
.overview text.title{font-weight:600;font-size:13px;fill:var(--color-foreground-primary)}
.overview text.row{text-anchor:start;font-weight:600;font-size:14px;fill:var(--color-brand-content)}
.overview text.label{text-anchor:start;font-style:italic}
.overview path{fill:none;stroke:var(--color-foreground-secondary);stroke-width:1.3}
.overview path.tip{fill:var(--color-foreground-secondary);stroke:none}
""".replace("\n", "")


def overview(docs: Path) -> str:
    """The picture as a block of raw HTML."""
    return f"```{{raw}} html\n{picture()}\n```\n"
