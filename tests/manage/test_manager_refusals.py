from __future__ import annotations

import numpy as np
import pytest
from support.named_manager import NamedManager, ScheduledRequest, run

from kvcore.errors import IntegrityError, NotBuiltError, RequestError
from kvcore.spec.retention import Encoder, Full, Window


@pytest.mark.parametrize(
    ("groups", "field"),
    [([(Full(), 16), (Window(8, keep_first=4), 16)], "keep_first"), ([(Encoder(100), 16)], "retention")],
)
def test_retentions_that_are_not_built(manager_of, groups, field):
    with pytest.raises(NotBuiltError) as caught:
        manager_of(*groups)
    assert field in caught.value.field


def test_several_states_of_a_request_are_not_built():
    from kvcore.manage.group_rule import GroupRule
    from kvcore.spec.retention import Latest

    GroupRule(0, 1, Latest(1))
    with pytest.raises(NotBuiltError, match="Latest"):
        GroupRule(0, 1, Latest(2))


def test_bad_calls_are_typed_errors_and_change_nothing(manager_of):
    manager = manager_of()
    manager.begin("a", range(4))
    manager.begin("b", range(4))
    before = manager.stats()
    bad = [
        lambda: manager.begin("a", range(4)),
        lambda: manager.begin("c", []),
        lambda: manager.begin("c", [-1]),
        lambda: manager.lookup(["c"]),
        lambda: manager.table("c", 0),
        lambda: manager.table("a", 1),
        lambda: manager.free(["a", "c"]),
        lambda: manager.free(["a", "a"]),
        lambda: manager.fork("a", ["b"]),
        lambda: manager.fork("a", ["x", "x"]),
        lambda: manager.allocate([ScheduledRequest("a", 0)]),
        lambda: manager.allocate([ScheduledRequest("a", 5)]),
        lambda: manager.allocate([ScheduledRequest("b", 1), ScheduledRequest("b", 1)]),
        lambda: manager.allocate([ScheduledRequest("b", 1), ScheduledRequest("c", 1)]),
    ]
    for call in bad:
        with pytest.raises(RequestError):
            call()
    with pytest.raises(IntegrityError):
        manager.commit(1, {})
    with pytest.raises(IntegrityError):
        manager.retire(1)
    assert manager.stats() == before


def test_bad_commits_change_nothing(manager_of):
    manager = manager_of()
    for name in "ab":
        manager.begin(name, range(4))
    manager.allocate([ScheduledRequest("a", 4)])
    manager.allocate([ScheduledRequest("a", 1)])
    with pytest.raises(IntegrityError):
        manager.commit(2, {"a": [1]})
    with pytest.raises(RequestError):
        manager.commit(1, {"b": [1]})
    manager.commit(1, {})
    with pytest.raises(RequestError, match="knows 4"):
        manager.commit(2, {})
    manager.commit(2, {"a": [1]})
    with pytest.raises(RequestError):
        manager.lookup(["a"])
    with pytest.raises(IntegrityError):
        manager.commit(2, {})


def test_check_integrity_finds_planted_faults(manager_of):
    def running() -> NamedManager:
        manager = manager_of((Full(), 4), (Window(8), 4))
        manager.begin("a", range(12))
        run(manager, ("a", 12), a=1)
        manager.check_integrity()
        return manager

    def row(m: NamedManager, g: int):
        return m.requests.blocks.view(m.row("a") * 2 + g)

    def lengthen(m: NamedManager) -> None:
        m.requests.blocks.append(np.array([m.row("a") * 2]), np.array([9]))

    faults = [
        lengthen,
        lambda m: row(m, 1).__setitem__(0, row(m, 0)[0]),
        lambda m: row(m, 0).__setitem__(0, row(m, 0)[1]),
        lambda m: m.requests.first.__setitem__((m.row("a"), 0), 9),
        lambda m: m._prefixes.cache._index[1].update({b"x": int(row(m, 0)[0])}),
        lambda m: m._pool.refs.__setitem__(row(m, 0)[0], 2),
    ]
    for fault in faults:
        manager = running()
        fault(manager)
        with pytest.raises(IntegrityError):
            manager.check_integrity()
