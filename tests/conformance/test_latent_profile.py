"""The kit over latents: a right backend of a few lines holds the profile, and broken ones do not."""

from dataclasses import dataclass

import pytest
import torch

import kvcore
from kvcore.attention.backend import AttentionBackend
from kvcore.attention.query import Capabilities
from kvcore.errors import Refusal
from kvcore.registry.loader import installed
from kvcore.spec.content import Latent
from kvcore.spec.layout import KernelBlocks, LayoutOption, plain_layout
from kvcore.testing import run
from kvcore.testing.checks.runner import selected
from kvcore.testing.report.matrix import matrix


@dataclass(frozen=True)
class Options:
    """None."""


class LatentBackend(AttentionBackend):
    """Absorbed latent attention, one query at a time."""

    skipped_tokens = 0

    def prepare(self, batch, group):
        return batch, batch.groups[group.kv_group]

    def write(self, layer, tensors, cache, metadata):
        slots = metadata[1].slot_mapping_T
        keep = slots >= 0
        size = cache["latent"].shape[1]
        at = slots[keep]
        rows = tensors["latent"][: len(slots)][keep]
        cache["latent"][at // size, at % size] = rows.to(cache["latent"].dtype)

    def rank_slice(self, query):
        return slice(0, query.head_dim_v)

    def attend(self, layer, query, cache, metadata, out, lse=None):
        batch, group = metadata
        out.zero_()
        size = cache["latent"].shape[1]
        for s in range(batch.num_seqs):
            first, end = batch.query_start_loc_host[s : s + 2].tolist()
            length = int(batch.seq_lens_host[s])
            positions = torch.arange(length)
            blocks = group.block_table_SN[s][positions // size].long()
            latent_nD = cache["latent"][blocks, positions % size].double()
            for row in range(first, end):
                seen = latent_nD[: length - (end - 1 - row) - self.skipped_tokens]
                score_Hn = query["q"][row].double() @ seen.T * layer.query.softmax_scale
                out[row] = (score_Hn.softmax(-1) @ seen[:, self.rank_slice(layer.query)]).to(out.dtype)


class LatentSpec(kvcore.BackendSpec):
    """Causal attention over latents, on a CPU."""

    name = "latents"
    priority = {"cpu": 1}
    Config = Options
    reads_unwritten_slots = False
    max_offset_bits = 63
    backend = LatentBackend

    @classmethod
    def unavailable(cls, options):
        return None

    @classmethod
    def unsupported_device(cls, facts, options):
        return None if facts.kind == "cpu" else Refusal("device", facts.kind, "cpu")

    @classmethod
    def unsupported(cls, query, options):
        table = Capabilities(contents=("latent",), dtypes=("bfloat16", "float32"), features=("scale", "unlike_dims"))
        return table.check(query)

    @classmethod
    def layouts(cls, spec, facts, options):
        if not isinstance(spec.content, Latent):
            return ()
        return [LayoutOption(plain_layout(spec.content), KernelBlocks(multiple_of=16))]

    @classmethod
    def create(cls, device, options):
        return cls.backend()


def with_fault(**changed):
    return type("Faulty", (LatentSpec,), {"backend": type("Broken", (LatentBackend,), changed)})


def profile(spec, level="full"):
    return run(spec, level=level, where={"content": "latent"})


def test_a_right_backend_holds_it():
    results = run(LatentSpec, level="full")
    # The declaration stands in this file, which needs torch.
    assert [r.case.id for r in results if r.outcome == "failed"] == ["L0.no_torch"]
    passed = {r.case.id for r in results if r.outcome == "passed"}
    assert {"L0.core_profile", "L1.write.content=latent.mixed", "L2.attend.content=latent.decode"} <= passed
    # Everything over KV heads is refused, and seen to be.
    others = {r.outcome for r in results if r.case.seqs and r.case.stores == "kv"}
    assert others == {"unsupported"}


def test_its_blocks_and_dtype_are_asked_for():
    mine = next(c for c in selected(LatentSpec) if c.profile == "latent")
    assert (mine.dtype, mine.block_size) == ("float32", 16)


def late_rank(self, query):
    return slice(query.head_dim - query.head_dim_v, query.head_dim)


def default_scale(self, layer, query, cache, metadata, out, lse=None):
    query = {"q": query["q"] * (layer.query.head_dim**-0.5 / layer.query.softmax_scale)}
    LatentBackend.attend(self, layer, query, cache, metadata, out, lse)


def padding_to_block_0(self, layer, tensors, cache, metadata):
    cache["latent"][0, 0] = tensors["latent"][0].to(cache["latent"].dtype)
    LatentBackend.write(self, layer, tensors, cache, metadata)


def transposed_write(self, layer, tensors, cache, metadata):
    flipped = {"latent": tensors["latent"].flip(1)}
    LatentBackend.write(self, layer, flipped, cache, metadata)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"rank_slice": late_rank}, "the oracle says"),
        ({"attend": default_scale}, "without scale"),
        ({"skipped_tokens": 1}, "the oracle says"),
        ({"write": padding_to_block_0}, "outside its slots"),
        ({"write": transposed_write}, "field latent is not what was written"),
    ],
    ids=["values_from_the_end", "scale_ignored", "last_token_lost", "writes_block_0", "rope_first"],
)
def test_a_broken_one_does_not(changed, words):
    failed = [r for r in profile(with_fault(**changed), level="quick") if r.outcome == "failed"]
    assert any(words in r.reason for r in failed), [(r.case.id, r.reason) for r in failed]


def test_the_matrix_names_the_profiles():
    specs = LatentSpec, installed().backend("torch")
    results = [r for spec in specs for r in run(spec, [c for c in selected(spec) if c.profile])]
    cells = {(c.value, c.backend): c.outcome for c in matrix(results) if c.feature == "profile"}
    assert cells == {
        ("latent", "latents"): "passed",
        ("latent", "torch"): "unsupported",
        ("kv", "latents"): "unsupported",
        ("kv", "torch"): "passed",
        ("encoder", "latents"): "unsupported",
        ("encoder", "torch"): "passed",
    }
