"""Tensors that do not lie as a projection leaves them: any strides in, any strides out, the same numbers."""

import pytest
import torch

pytest.importorskip("triton")

from kvcore_triton.declaration import TritonBackendSpec, TritonOptions

from kvcore.errors import BackendUnsupportedError, LayoutError

FEW = {"lengths": (5, 40), "scheduled": (1, 4), "first_blocks": (0, 0), "block_size": 16}


def interpreted():
    return TritonBackendSpec.create("cpu", TritonOptions(interpret=True, num_splits=2))


class Relaid:
    """The backend, every tensor given anew by `relay`; what it writes is carried back."""

    def __init__(self, relay):
        self.backend, self.relay = interpreted(), relay

    def prepare(self, batch, group):
        return self.backend.prepare(batch, group)

    def write(self, layer, tensors, *rest):
        self.backend.write(layer, {n: self.relay(x) for n, x in tensors.items()}, *rest)

    def attend(self, layer, query, cache, metadata, out, lse=None):
        mine, sums = self.relay(out), None if lse is None else self.relay(lse)
        self.backend.attend(layer, {"q": self.relay(query["q"])}, cache, metadata, mine, sums)
        out.copy_(mine)
        if lse is not None:
            lse.copy_(sums)


def head_major(x):
    return x.transpose(0, 1).contiguous().transpose(0, 1)


def every_other(x):
    return x.repeat_interleave(2, -1)[..., ::2]


def off_by_one(x):
    """Neither the address nor the rows are multiples of 16 bytes."""
    wide = torch.zeros(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)
    wide[..., 1:-2] = x
    return wide[..., 1:-2]


@pytest.mark.parametrize("relay", [head_major, every_other, off_by_one])
@pytest.mark.parametrize("dim", [16, 17])
def test_strides_change_no_number(scene, relay, dim):
    facts = {"head_dim": dim, "head_dim_v": 20, "lse": True}
    plain, other = (scene(facts, **FEW).run(backend) for backend in (interpreted(), Relaid(relay)))
    assert torch.isfinite(plain[0]).all()
    for want, got in zip(plain, other, strict=True):
        assert torch.equal(got, want)


def test_rows_after_the_last_query_stay(scene):
    """Padding of an output that is copied into place."""
    mine = scene({"head_dim": 16, "head_dim_v": 16, "lse": True}, **FEW)

    class Padded(Relaid):
        def attend(self, layer, query, cache, metadata, out, lse=None):
            rows = len(out)
            out, lse = (every_other(torch.full((rows + 3, *x.shape[1:]), 7.0)) for x in (out, lse))
            self.backend.attend(layer, query, cache, metadata, out, lse)
            assert (out[rows:] == 7).all()
            assert (lse[rows:] == 7).all()
            assert not (out[:rows] == 7).any()

    mine.run(Padded(head_major))


def test_heads_further_apart_than_2_31_elements(scene):
    """The third head of queries, values and outputs starts beyond what 32 bits count."""
    apart = 2**30 + 1
    # Only the pages that are touched become memory.
    storage = torch.empty(2 * apart + (1 << 16), dtype=torch.bfloat16)
    begins = iter(range(0, 1 << 16, 1 << 11))

    def far(x):
        if x.dim() == 2:
            return x.clone()
        tokens, heads, dim = x.shape
        made = storage.as_strided((tokens, heads, dim), (dim, apart, 1), next(begins))
        return made.copy_(x)

    facts = {
        "head_dim": 17,
        "head_dim_v": 17,
        "lse": True,
        "num_heads": 3,
        "num_kv_heads": 3,
        "dtype": "bfloat16",
        "cache_dtype": "bfloat16",
    }
    plain, other = (scene(facts, **FEW).run(backend) for backend in (interpreted(), Relaid(far)))
    for want, got in zip(plain, other, strict=True):
        assert torch.equal(got, want)


def test_a_cache_that_no_layout_gives_is_refused(scene):
    mine = scene({"head_dim": 16, "head_dim_v": 16}, **FEW)
    mine.cache = {n: off_by_one(x) for n, x in mine.cache.items()}
    with pytest.raises(LayoutError, match="rows of k do not start at multiples of 4 elements"):
        mine.run(interpreted())


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_interpreting_beside_a_cpu_is_refused(device):
    with pytest.raises(BackendUnsupportedError, match="interpreter runs kernels on a CPU") as told:
        TritonBackendSpec.create(device, TritonOptions(interpret=True))
    assert told.value.field == "backends.triton.interpret"
