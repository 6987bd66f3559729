"""The cases over a plugin's content: those of keys and values, and two of its own. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from kvcore.spec.content import Content
from kvcore.testing.cases.builder import CaseBuilder
from kvcore.testing.cases.case import Base, Case


def over(content: type[Content], cases: Sequence[Case], base: Base) -> list[Case]:
    """What a backend is asked about a content of one's own.

    Quantized caches and latents are left out: the content stands in for plain keys and values.

    Args:
        content: The content.
        cases: The catalogue.
        base: The plainest problem that the backend takes under this content.
    """
    found = (c.storing(content) for c in [*_of_its_own(CaseBuilder(base)), *cases])
    return sorted((c for c in found if c is not None), key=lambda c: c.level)


def _of_its_own(m: CaseBuilder) -> Iterator[Case]:
    yield Case("L0.content", "L0", "content", dtype=m.base.dtype, head_dim=m.base.head_dim)
    for phase in ("mixed", "chunked"):
        yield m.case("L1", "copies", "base", phase, layers=2)
    yield m.case("L1", "copies", "kernel_ratio=2", "mixed", kernel_ratio=2)
    yield m.case("L1", "copies", "window.tail", "decode", window=m.base.block_size + 1, own_retention=True)
    yield m.case("L1", "copies", "packed", "mixed", placement="packed", layers=2)
    yield m.case("L1", "copies", "layout=1", "mixed", layout=1)
