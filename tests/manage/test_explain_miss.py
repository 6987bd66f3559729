from __future__ import annotations

import pytest
from support.named_manager import NamedManager, ScheduledRequest

from kvcore.errors import ConfigError, RequestError
from kvcore.manage.block_hash import Adapter, Multimodal
from kvcore.spec.retention import Full, Window


@pytest.fixture
def manager_of(config_of):
    def make(*groups, blocks=100, **options) -> NamedManager:
        options = {"explain_history": 8, **options}
        return NamedManager(config_of(groups or [(Full(), 4)], blocks), **options)

    return make


def run(manager: NamedManager, name: str, tokens, **options) -> None:
    manager.begin(name, tokens, **options)
    (hit,) = manager.lookup([name])
    given = manager.allocate([ScheduledRequest(name, len(tokens) - hit)])
    manager.commit(given.step, {name: [0]})
    manager.retire(given.step)


def test_reasons_that_lie_in_the_request(manager_of):
    manager = manager_of()
    lora, image = Adapter(b"x"), Multimodal(b"i", 4, 2)
    run(manager, "a", range(100, 120))
    run(manager, "same", range(100, 120))
    run(manager, "other", range(200, 210))
    run(manager, "parts", [*range(100, 110), 7, 7, 7, 7])
    run(manager, "salted", range(100, 120), salt="s")
    run(manager, "tuned", range(100, 120), extras=[lora])
    run(manager, "pictured", range(100, 120), extras=[image])
    found = {n: manager.explain_miss(n) for n in ("a", "same", "other", "parts", "salted", "tuned", "pictured")}
    assert {n: m.reason for n, m in found.items()} == {
        "a": "first",
        "same": "none",
        "other": "first",
        "parts": "token",
        "salted": "salt",
        "tuned": "adapter",
        "pictured": "multimodal",
    }
    assert (found["parts"].position, found["parts"].cached_tokens, found["parts"].possible_tokens) == (10, 8, 12)
    assert (found["pictured"].cached_tokens, found["pictured"].position) == (4, 4)
    assert found["salted"].other in ("a", "same")


def test_evicted(manager_of):
    manager = manager_of(blocks=7)
    run(manager, "a", range(16))
    manager.free(["a"])
    run(manager, "b", range(50, 66))
    manager.free(["b"])
    run(manager, "again", range(17))
    miss = manager.explain_miss("again")
    assert (miss.reason, miss.group, miss.other) == ("evicted", 0, "a")
    assert miss.position == miss.cached_tokens
    assert "token" in miss.text


def test_window(manager_of):
    manager = manager_of((Full(), 4), (Window(4), 4), blocks=17)
    run(manager, "a", range(32))  # takes 16 blocks, and the window gives up 7 of its 8
    run(manager, "b", range(60, 72))  # takes 6 of those, from the tail
    manager.free(["b"])
    run(manager, "short", [*range(12), 99])
    miss = manager.explain_miss("short")
    assert (miss.reason, miss.group) == ("window", 1)
    assert (miss.other, miss.cached_tokens, miss.position) == ("a", 4, 8)


def test_reset_and_not_computed(manager_of):
    manager = manager_of()
    run(manager, "a", range(20))
    manager.reset_prefix_cache()
    run(manager, "b", range(20))
    assert manager.explain_miss("b").reason == "reset"
    for name in "cd":
        manager.begin(name, range(40, 60))
    manager.allocate([ScheduledRequest("c", 20), ScheduledRequest("d", 20)])
    assert manager.explain_miss("d")[:3] == ("not_computed", 0, 16)


def test_disabled_and_forgotten(manager_of):
    manager = manager_of(prefix_caching=False)
    run(manager, "a", range(20))
    assert manager.explain_miss("a").reason == "disabled"
    short = manager_of(explain_history=1)
    run(short, "a", range(20))
    run(short, "b", range(20))
    with pytest.raises(RequestError):
        short.explain_miss("a")
    with pytest.raises(ConfigError, match="explain_history"):
        manager_of(explain_history=0).explain_miss("a")
    with pytest.raises(ConfigError):
        manager_of(explain_history=-1)
