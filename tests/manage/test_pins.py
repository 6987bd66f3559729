"""Pinned prefixes survive a full cache, and nothing else does."""

from __future__ import annotations

import pytest
from support.named_manager import run

from kvcore.errors import IntegrityError, OutOfBlocksError, RequestError
from kvcore.spec.retention import Full, Window


def fill(manager, first: int, count: int) -> None:
    """So many requests of three blocks, one after the other, that share nothing."""
    for i in range(first, first + count):
        manager.begin(f"other{i}", [1000 + i] * 48)
        run(manager, (f"other{i}", 48), **{f"other{i}": 1})
        manager.free([f"other{i}"])


@pytest.mark.parametrize("groups", [[(Full(), 16)], [(Full(), 16), (Window(20), 16)]])
def test_pinned_blocks_survive_a_full_cache(manager_of, groups):
    manager = manager_of(*groups, blocks=15)
    for name in ("pinned", "loose"):
        manager.begin(name, [ord(name[0])] * 40)
        run(manager, (name, 40), **{name: 1})
    pin = manager.pin(manager.row("pinned"))
    manager.free(["pinned", "loose"])
    fill(manager, 0, 20)
    assert manager.stats()["evictions"] > 10
    for name in ("pinned", "loose"):
        manager.begin(name, [ord(name[0])] * 40)
    assert manager.lookup(["pinned", "loose"]) == [32, 0]
    manager.check_integrity()
    manager.unpin(pin)
    assert manager.stats()["blocks_used"] == 0
    fill(manager, 20, 20)
    manager.check_integrity()
    assert manager.lookup(["pinned"]) == [0]
    with pytest.raises(RequestError, match="pinned"):
        manager.unpin(pin)


def test_pinned_blocks_are_used_and_a_reset_leaves_nothing_to_hit(manager_of):
    manager = manager_of(blocks=4)
    manager.begin("a", range(33))
    run(manager, ("a", 33), a=1)
    pin = manager.pin(manager.row("a"))
    manager.free(["a"])
    assert (manager.stats()["blocks_used"], manager.stats()["blocks_free"]) == (2, 1)
    manager.begin("b", [7] * 20)
    with pytest.raises(OutOfBlocksError):
        run(manager, ("b", 20))
    manager.reset_prefix_cache()
    manager.begin("again", range(33))
    assert manager.lookup(["again"]) == [0]
    manager.unpin(pin)
    assert manager.stats()["blocks_free"] == 3
    manager.check_integrity()


def test_a_step_is_void_after_a_pin(manager_of):
    manager = manager_of()
    manager.begin("a", range(40))
    run(manager, ("a", 32))
    step = manager.begin_step()
    manager.pin(manager.row("a"))
    with pytest.raises(IntegrityError, match="changed hands"):
        manager.allocate(step)
    with pytest.raises(RequestError):
        manager.pin(99)
