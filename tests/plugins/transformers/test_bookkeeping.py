"""Random passes, selections and crops: every sequence attends to its own history, as dense attention in float64 says.

The layers are called as a model would call them, with queries, keys and values that follow from the history of a
sequence alone; so sequences that agree, and share their blocks, agree in all of them, and no others do.
"""

from __future__ import annotations

import zlib
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 16, 20
GEOMETRY = {
    "model_type": "gpt_oss",
    "vocab_size": 8,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "head_dim": DIM,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": WINDOW,
    "layer_types": ["sliding_attention", "full_attention"],
    "max_position_embeddings": 256,
    "torch_dtype": "float32",
}
SINKS = torch.linspace(-1, 1, HEADS)


@cache
def tensors(history: tuple[int, ...], layer: int) -> tuple[torch.Tensor, ...]:
    """Query [H, D], key [K, D] and value [K, D] of the last token of a history."""
    generator = torch.Generator().manual_seed(zlib.crc32(repr((history, layer)).encode()))
    return tuple(torch.randn(heads, DIM, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))


def dense(history: tuple[int, ...], layer: int) -> torch.Tensor:
    """Attention of the last token, [H, D]."""
    first = max(0, len(history) - WINDOW) if layer == 0 else 0
    each = [tensors(history[: i + 1], layer) for i in range(first, len(history))]
    keys, values = (torch.stack([t[n] for t in each]).double().repeat_interleave(HEADS // KV_HEADS, 1) for n in (1, 2))
    scores = torch.einsum("hd,shd->hs", each[-1][0].double(), keys) * DIM**-0.5
    weights = torch.cat((scores, SINKS.double()[:, None]), 1).softmax(-1)[:, :-1]
    return torch.einsum("hs,shd->hd", weights, values)


@pytest.fixture(scope="module")
def paged() -> Any:
    """A cache of 200 blocks for all worlds, one after another."""
    from kvcore.cache import PagedCache

    return PagedCache.for_model(
        GEOMETRY,
        backend="torch",
        device="cpu",
        cache={"num_blocks": 200, "block_size": 8},
        engine={"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 512},
        parameters=lambda cache_id: {"sinks": SINKS},
    )


class World:
    """A batch in a cache, and what each sequence of it has seen."""

    def __init__(self, paged: Any) -> None:
        from kvcore_transformers.forward import ForwardPass
        from kvcore_transformers.sequences import Sequences

        for row in paged.rows:  # of a world that failed
            paged.leave(row)
        self.paged, self.sequences, self.forward_pass = paged, Sequences(paged), ForwardPass
        self.histories: list[tuple[int, ...]] = []
        self.cropped = False  # sequences that come to agree stay two

    def step(self, new: list[list[int]]) -> None:
        if not self.histories:
            self.histories = [()] * len(new)
            self.sequences.rows, self.sequences.fed = [-1] * len(new), [0] * len(new)
        width = max(map(len, new))
        parts = self.sequences.tell([np.array(own, np.int64) for own in new])
        self.sequences.begin(parts)
        self.histories = [h + tuple(own) for h, own in zip(self.histories, new, strict=True)]
        pass_ = self.forward_pass(self.paged, (len(new), width), parts)
        for layer in (0, 1):
            shapes = (HEADS, KV_HEADS, KV_HEADS)
            padded = [torch.full((len(new), heads, width, DIM), torch.nan) for heads in shapes]
            for lane, own in enumerate(new):
                for t in range(len(own)):
                    history = self.histories[lane][: len(self.histories[lane]) - len(own) + t + 1]
                    for tensor, value in zip(padded, tensors(history, layer), strict=True):
                        tensor[lane, :, width - len(own) + t] = value
            module = SimpleNamespace(layer_idx=layer, is_causal=True)
            window = WINDOW if layer == 0 else None
            passed = {"s_aux": SINKS, "sliding_window": window}
            out = pass_.attend(module, tuple(padded), passed)
            for lane, own in enumerate(new):
                assert (out[lane, : width - len(own)] == 0).all()
                if own:
                    want = dense(self.histories[lane], layer)
                    torch.testing.assert_close(out[lane, -1].double(), want, atol=1e-5, rtol=1e-5)
        pass_.check_reached()
        self.sequences.finish()
        rows, distinct = {r for r in self.sequences.rows if r >= 0}, set(self.histories) - {()}
        assert len(rows) >= len(distinct) if self.cropped else len(rows) == len(distinct)

    def check(self) -> None:
        self.sequences.manager.check_integrity()
        assert self.sequences.fed == list(map(len, self.histories))
        assert sorted(self.paged.rows) == sorted({r for r in self.sequences.rows if r >= 0})


@pytest.mark.parametrize("told", [False, True])
@settings(max_examples=10)
@given(data=st.data())
def test_every_sequence_keeps_its_own_history(paged, told, data):
    from kvcore.errors import NotBuiltError

    world, draw = World(paged), data.draw
    tokens = st.lists(st.integers(0, 1), min_size=1, max_size=12)
    if told:  # begun by a look-up, when nothing can be found yet
        first = draw(st.lists(tokens, min_size=1, max_size=4))
        assert world.sequences.find([np.array(own, np.int64) for own in first]) == [0] * len(first)
        world.sequences.fed = [0] * len(first)
        world.histories = [()] * len(first)
        world.step(first)
    else:
        world.step(draw(st.lists(tokens | st.just([]), min_size=1, max_size=4).filter(any)))
    for _ in range(draw(st.integers(1, 7))):
        what = draw(st.sampled_from(["step", "step", "select", "truncate"]))
        size = len(world.histories)
        if what == "step":
            width = draw(st.sampled_from([1, 1, 5, 17]))
            some = st.lists(st.integers(0, 1), min_size=width, max_size=width)
            world.step([draw(some) for _ in range(size)])
        elif what == "select":
            lanes = draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
            world.sequences.select(lanes)
            world.histories = [world.histories[i] for i in lanes]
        else:
            gone = draw(st.integers(0, 12))
            keeps = [max(0, len(h) - gone) for h in world.histories]
            world.cropped = True
            try:
                world.sequences.truncate(keeps)
            except NotBuiltError:
                world.check()
                break
            world.histories = [h[:n] for h, n in zip(world.histories, keeps, strict=True)]
        world.check()
    world.sequences.clear()
    world.sequences.manager.check_integrity()
    assert world.sequences.manager.stats()["blocks_used"] == 0
