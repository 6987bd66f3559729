"""Next to no byte of a filled arena is wasted, nor after churn; all shapes: `tests/benchmarks/bench_packing.py`."""

from __future__ import annotations

import pytest
from support.packing import Packing, attention_shapes, hybrid_shapes

SHORT = ("10 full + 52 window 1024", "13 full + 31 window 512")


@pytest.mark.parametrize("name", SHORT)
def test_a_filled_and_churned_arena(name: str) -> None:
    packing = Packing(attention_shapes()[name], 8192, 64 << 30)
    packing.fill()
    assert packing.efficiency >= 0.97
    packing.churn()
    packing.manager.check_integrity()
    assert packing.efficiency >= 0.93


def test_states_beside_attention() -> None:
    (caches,) = (c for name, c in hybrid_shapes("bfloat16").items() if name.startswith("Zamba2"))
    packing = Packing(caches, 8192, 64 << 30)
    packing.fill()
    assert packing.efficiency >= 0.97
    packing.churn()
    packing.manager.check_integrity()
    assert packing.efficiency >= 0.93


@pytest.mark.long
@pytest.mark.parametrize("length", [8192, 131072])
@pytest.mark.parametrize("name", [*attention_shapes(), *hybrid_shapes("bfloat16"), *hybrid_shapes("fp8_e4m3")])
def test_every_shape(name: str, length: int) -> None:
    shapes = {**attention_shapes(), **hybrid_shapes("bfloat16"), **hybrid_shapes("fp8_e4m3")}
    packing = Packing(shapes[name], length, 64 << 30)
    packing.fill()
    assert packing.efficiency >= (0.97 if length == 8192 else 0.99)
    for _ in range(10):
        packing.churn()
        assert packing.efficiency >= 0.93
    packing.manager.check_integrity()
