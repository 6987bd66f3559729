"""Each reason why a prompt was not reused, planted; and that the reasons account for every token."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.named_manager import NamedManager, ScheduledRequest

from kvcore.errors import ConfigError, RequestError
from kvcore.manage.explain.explanation import Explanation
from kvcore.manage.prefix.block_hash import Adapter, Multimodal
from kvcore.spec.retention import Chunk, Full, Window


@pytest.fixture
def manager_of(config_of):
    def make(*groups, blocks=100, **options) -> NamedManager:
        return NamedManager(config_of(groups or [(Full(), 4)], blocks), **{"explain": True, **options})

    return make


def run(manager: NamedManager, name: str, tokens, **options) -> Explanation:
    manager.begin(name, tokens, **options)
    (hit,) = manager.lookup([name])
    given = manager.allocate([ScheduledRequest(name, len(tokens) - hit)])
    manager.commit(given.step, {name: [0]})
    manager.retire(given.step)
    told = manager.explain(manager.row(name))
    assert (told.prompt_tokens, told.hit_tokens) == (len(tokens), hit)
    return told


def counted(told: Explanation) -> list[tuple[str, int, int]]:
    """(reason, start, tokens); checked to follow each other from the end of the hit to that of the prompt."""
    at = told.hit_tokens
    for missed in told.missed:
        assert missed.start == at
        assert missed.tokens > 0
        assert missed.text
        at += missed.tokens
    assert at == told.prompt_tokens
    assert sum(told.by_reason().values()) + told.hit_tokens == told.prompt_tokens
    return [(m.reason, m.start, m.tokens) for m in told.missed]


def test_first_differing_token_with_both_ids(manager_of):
    manager = manager_of()
    assert counted(run(manager, "a", range(100, 120))) == [("never_cached", 0, 16), ("granularity", 16, 4)]
    told = run(manager, "b", [*range(100, 110), 7, 7, 7, 7, 7, 7])
    assert counted(told) == [("granularity", 8, 2), ("token", 10, 2), ("granularity", 12, 4)]
    assert told.missed[1][:5] == ("token", 10, 2, 7, 110)
    assert "token 10 is 7, and 110" in told.missed[1].text
    assert "group" not in told.as_dict()["missed"][1]
    # The difference begins a block: nothing is lost to its beginning.
    told = run(manager, "c", [*range(100, 108), 8, 8, 8, 8, 8, 8])
    assert counted(told) == [("token", 8, 4), ("granularity", 12, 2)]
    assert told.missed[0].theirs in (7, 108)


def test_all_that_can_be_is_reused(manager_of):
    manager = manager_of()
    run(manager, "a", range(20))
    assert counted(run(manager, "b", range(20))) == [("granularity", 16, 4)]  # never the last token
    assert counted(run(manager, "c", range(18))) == [("granularity", 16, 2)]


def test_a_text_that_goes_on_where_others_ended_was_never_cached(manager_of):
    manager = manager_of()
    run(manager, "a", range(8))
    assert counted(run(manager, "b", range(17))) == [("never_cached", 8, 8), ("granularity", 16, 1)]
    assert counted(run(manager, "c", range(50, 59))) == [("never_cached", 0, 8), ("granularity", 8, 1)]


def test_other_conditions(manager_of):
    manager = manager_of()
    lora, image = Adapter(b"x"), Multimodal(b"i", 4, 2)
    run(manager, "a", range(100, 120))
    assert counted(run(manager, "salted", range(100, 121), salt="s"))[0] == ("salt", 0, 20)
    assert counted(run(manager, "tuned", range(100, 121), extras=[lora]))[0] == ("adapter", 0, 20)
    assert counted(run(manager, "pictured", range(100, 121), extras=[image]))[0] == ("item", 4, 16)
    # As far as the tokens are equal, and then what goes on otherwise.
    told = run(manager, "part", [*range(100, 109), 5, 5, 5, 5], salt="t")
    assert counted(told) == [("salt", 0, 8), ("granularity", 8, 1), ("token", 9, 3), ("granularity", 12, 1)]
    assert (told.missed[2].ours, told.missed[2].theirs) == (5, 109)


def test_evicted_when_and_for_whom(manager_of):
    manager = manager_of(blocks=7)
    run(manager, "a", range(16))
    manager.free(["a"])
    run(manager, "b", range(50, 66))
    manager.free(["b"])
    told = run(manager, "again", range(17))
    # Six blocks in all: "b" took the two that were empty and two of the four of "a", the tail first.
    assert counted(told) == [("evicted", 8, 8), ("granularity", 16, 1)]
    assert (told.missed[0].step, told.missed[0].request) == (2, "b")
    assert told.missed[0].text == "evicted before step 2 for request b"


def test_what_lies_behind_a_lost_block_is_lost_with_it(manager_of):
    """The first block alone is forgotten: what follows is cached, and nobody can reach it."""
    manager = manager_of()
    run(manager, "a", range(17))
    real = manager.real
    first = np.array(manager.table("a", 0)[1][:1])
    real._prefixes.remove(first)
    real._pool.uncache(first)
    real._explainer.withdrawn(9)
    told = run(manager, "b", range(17))
    assert counted(told) == [("withdrawn", 0, 16), ("granularity", 16, 1)]
    assert told.missed[0].step == 9


def test_window_veto_names_the_group(manager_of):
    manager = manager_of((Full(), 4), (Window(4), 4), blocks=17)
    run(manager, "a", range(32))  # takes 16 blocks, and the window gives up 7 of its 8
    run(manager, "b", range(60, 72))  # takes 6 of those, from the tail
    manager.free(["b"])
    told = run(manager, "short", [*range(12), 99])
    assert counted(told) == [("window", 4, 8), ("granularity", 12, 1)]
    assert (told.missed[0].group, told.missed[0].request, told.missed[0].step) == (1, "b", 2)
    assert "group 1" in told.missed[0].text


def test_reset_withdrawn_and_not_computed(manager_of):
    manager = manager_of()
    run(manager, "a", range(21))
    manager.reset_prefix_cache()
    told = run(manager, "b", range(21))
    assert counted(told) == [("reset", 0, 20), ("granularity", 20, 1)]
    assert told.missed[0].step == 2
    for name in "cd":
        manager.begin(name, range(40, 61))
    manager.allocate([ScheduledRequest("c", 21), ScheduledRequest("d", 21)])
    told = manager.explain(manager.row("d"))
    assert counted(told) == [("not_computed", 0, 20), ("granularity", 20, 1)]
    assert told.missed[0].request == "c"
    other = manager_of()
    run(other, "a", range(21))
    other.free(["a"], forget=True)
    assert counted(run(other, "b", range(21)))[0] == ("withdrawn", 0, 20)


def test_disabled_and_refused(manager_of):
    told = run(manager_of(prefix_caching=False), "a", range(20))
    assert counted(told) == [("disabled", 0, 20)]
    silent = manager_of(explain=False)
    silent.begin("a", range(20))
    with pytest.raises(ConfigError, match=r"cache\.explain"):
        silent.explain(silent.row("a"))
    manager = manager_of()
    manager.begin("a", range(20))
    with pytest.raises(RequestError):
        manager.explain(manager.row("a"))
    with pytest.raises(ConfigError, match="explain_history"):
        manager_of(explain_history=0)


def test_older_evictions_than_are_remembered_were_never_cached(manager_of):
    manager = manager_of(blocks=6, explain_history=2)
    for i in range(4):
        run(manager, f"r{i}", range(100 * i, 100 * i + 17))
        manager.free([f"r{i}"])
    assert counted(run(manager, "again", range(17)))[0][0] == "never_cached"


@pytest.mark.parametrize(
    ("groups", "blocks"),
    [
        ([(Full(), 4)], 25),
        ([(Full(), 4), (Window(5), 4)], 50),
        ([(Full(), 2), (Full(), 6)], 70),
        ([(Window(6), 4)], 25),
        ([(Full(), 4), (Chunk(8), 2), (Window(3), 4)], 80),
    ],
    ids=str,
)
def test_every_token_has_a_reason_whatever_happens(manager_of, groups, blocks):
    """Random texts of two letters, small pools, other conditions, resets: the parts follow each other to the end."""
    rng = random.Random(7)
    manager = manager_of(*groups, blocks=blocks, explain_history=20)
    seen, alive = set(), []
    for i in range(400):
        text = [rng.randrange(2) for _ in range(rng.randrange(1, 24))]
        extras = rng.choice([(), (), (), (Adapter(b"x"),), (Multimodal(b"i", 3, 2),)])
        told = run(manager, f"r{i}", text, salt=rng.choice(["", "", "s"]), extras=extras)
        seen |= {reason for reason, _, _ in counted(told)}
        alive.append(f"r{i}")
        if len(alive) > 2 or rng.random() < 0.5:
            manager.free([alive.pop(rng.randrange(len(alive)))], forget=rng.random() < 0.05)
        if rng.random() < 0.02:
            manager.reset_prefix_cache()
        manager.check_integrity()
    assert {"granularity", "token", "evicted", "never_cached"} <= seen


class Naive:
    """Blocks of four tokens of one group, as whole texts: what is cached, what was forgotten, all of it kept."""

    SIZE = 4

    def __init__(self) -> None:
        self.cached: set[tuple[str, tuple[int, ...]]] = set()
        self.linked: set[tuple[str, tuple[int, ...]]] = set()  # cached, and cached since below what they follow
        self.gone: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}

    def expect(self, salt: str, text: list[int]) -> list[tuple[str, int, int]]:
        """(reason, start, tokens), one after the other."""
        possible, at, found = (len(text) - 1) // self.SIZE * self.SIZE, 0, []
        while at < possible and (salt, tuple(text[: at + self.SIZE])) in self.cached:
            at += self.SIZE
        while at < possible:
            key = salt, tuple(text[: at + self.SIZE])
            if key in self.cached and found:
                found.append((found[-1][0], at, self.SIZE))
            elif key in self.gone and key not in self.cached:
                found.append(("evicted", at, self.SIZE))
            else:
                break
            at += self.SIZE
        where = {salt} if at else {"", "s"}
        while at < possible:
            before, block = tuple(text[:at]), text[at : at + self.SIZE]
            if at and not any((s, before) in self.cached for s in where):
                below = []
            else:
                below = [key for key in self.linked if key[0] in where and key[1][:at] == before]
                below = [key for key in below if len(key[1]) == at + self.SIZE]
            common = max((alike(block, key[1][at:]) for key in below), default=-1)
            if common < 0 or (not common and not at):
                found.append(("never_cached", at, possible - at))
                break
            if common < self.SIZE:
                found += [("granularity", at, common)] if common else []
                found.append(("token", at + common, possible - at - common))
                break
            where = {key[0] for key in below if alike(block, key[1][at:]) == common}
            where = where if len(where) == 1 else where & {salt}
            found.append(("salt", at, self.SIZE))
            at += self.SIZE
        found.append(("granularity", possible, len(text) - possible))
        merged: list[tuple[str, int, int]] = []
        for reason, start, tokens in found:
            if merged and merged[-1][0] == reason:
                merged[-1] = (reason, merged[-1][1], merged[-1][2] + tokens)
            else:
                merged.append((reason, start, tokens))
        return merged

    def become(self, cached: set[tuple[str, tuple[int, ...]]], step: int, name: str) -> None:
        """The step of request `name` left this behind."""
        for key in self.cached - cached:
            self.gone[key] = step, name
            below = [k for k in self.linked if k[0] == key[0] and k[1][:-4] == key[1]]
            self.linked -= {key, *below}
        fresh = cached - self.cached
        self.linked |= {key for key in fresh if len(key[1]) == self.SIZE or (key[0], key[1][:-4]) in cached}
        self.cached = cached


def alike(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@pytest.mark.parametrize("seed", range(8))
def test_reasons_are_those_of_a_list_of_everything(manager_of, seed):
    rng = random.Random(seed)
    manager, naive, names = manager_of(blocks=20), Naive(), {}
    reasons = set()
    for step in range(1, 150):
        text, salt, name = [rng.randrange(2) for _ in range(rng.randrange(1, 22))], rng.choice(["", "s"]), f"r{step}"
        expected = naive.expect(salt, text)
        told = run(manager, name, text, salt=salt)
        assert counted(told) == expected
        for missed in told.missed:
            if missed.reason == "evicted":
                key = salt, tuple(text[: missed.start + 4])
                assert (missed.step, missed.request) == naive.gone[key]
            if missed.reason == "token":
                assert missed.ours == text[missed.start] != missed.theirs
        reasons |= {reason for reason, _, _ in expected}
        digests = manager.real.requests.chain(manager.row(name)).digests
        names |= {digest: (salt, tuple(text[: 4 * i])) for i, digest in enumerate(digests, 1)}
        entries = manager.real._prefixes.cache.entries()
        naive.become({names[digest] for _, digest, _ in entries}, step, name)
        manager.free([name])
    assert reasons == {"granularity", "token", "evicted", "never_cached", "salt"}
