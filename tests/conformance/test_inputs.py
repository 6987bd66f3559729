"""A backend that changes what it is given is found out, and does not take the oracle along."""

import pytest

from kvcore.registry.loader import installed
from kvcore.testing import all_cases, run

TorchSpec = installed().backend("torch")
TorchBackend = type(TorchSpec.create("cpu", TorchSpec.Config()))
CASES = {c.id: c for c in all_cases("full")}


class Hostile(TorchBackend):
    """Calls `meddle` with all that it is given, at the end of one of its methods."""

    where = "attend"
    meddle = None

    def prepare(self, batch, group):
        self.batch = batch
        made = super().prepare(batch, group)
        if self.where == "prepare":
            self.meddle(group.layers[0], {}, batch)
        return made

    def write(self, layer, tensors, cache, metadata):
        super().write(layer, tensors, cache, metadata)
        if self.where == "write":
            self.meddle(layer, tensors, self.batch)

    def attend(self, layer, query, cache, metadata, out, lse=None):
        super().attend(layer, query, cache, metadata, out, lse)
        if self.where == "attend":
            self.meddle(layer, query, self.batch)


def outcome(case, where, meddle):
    backend = type("Meddler", (Hostile,), {"where": where, "meddle": meddle})
    spec = type("Spec", (TorchSpec,), {"create": classmethod(lambda cls, device, options: backend(device, options))})
    (result,) = run(spec, [CASES[case]])
    return result.outcome, result.reason


@pytest.mark.parametrize(
    ("case", "where", "meddle", "words"),
    [
        ("L2.attend.sinks=true.decode", "attend", lambda s, x, f, b: x.sinks.fill_(-50.0), "sinks"),
        ("L2.attend.alibi=true.decode", "attend", lambda s, x, f, b: x.alibi_slopes.zero_(), "alibi_slopes"),
        ("L2.attend.alibi=true.decode", "prepare", lambda s, x, f, b: x.alibi_slopes.zero_(), "alibi_slopes"),
        (
            "L2.attend.cache_dtype=fp8_e4m3_tensor.scale=0.3.mixed",
            "write",
            lambda s, x, f, b: x.k_scale.fill_(1.0),
            "k_scale",
        ),
        (
            "L1.write.cache_dtype=fp8_e4m3_tensor.scale=0.3.mixed",
            "write",
            lambda s, x, f, b: x.k_scale.fill_(1.0),
            "k_scale",
        ),
        ("L2.attend.base.mixed", "attend", lambda s, x, f, b: f["q"].zero_(), "the queries"),
        ("L2.attend.base.mixed", "write", lambda s, x, f, b: f["k"].zero_(), "the k that it was given"),
        ("L1.write.base.mixed", "write", lambda s, x, f, b: f["k"].zero_(), "the k that it was given"),
        ("L2.attend.base.mixed", "prepare", lambda s, x, f, b: b.groups[0].block_table_SN.zero_(), "block_table_SN"),
        ("L2.attend.base.mixed", "write", lambda s, x, f, b: b.groups[0].slot_mapping_T.fill_(-1), "slot_mapping_T"),
        ("L2.attend.base.mixed", "attend", lambda s, x, f, b: b.seq_lens_host.sort(), "seq_lens"),
    ],
)
def test_what_is_given_stays_as_it_is(case, where, meddle, words):
    found, reason = outcome(case, where, meddle)
    assert found == "failed"
    assert f"{where} changed" in reason or "prepare or write changed" in reason
    assert words in reason


def test_an_ignored_sink_that_is_wiped_is_no_pass():
    """The facts that the oracle judges by are its own."""

    def wipe(self, layer, given, batch):
        layer.sinks.fill_(-float("inf"))

    found, reason = outcome("L2.attend.sinks=true.decode", "prepare", wipe)
    assert found == "failed"
    assert "sinks" in reason


def test_a_log_sum_exp_that_never_repeats_is_not_deterministic():
    calls = []

    class Drifting(TorchBackend):
        def attend(self, layer, query, cache, metadata, out, lse=None):
            super().attend(layer, query, cache, metadata, out, lse)
            calls.append(1)
            if lse is not None:
                lse += 1e-7 * len(calls)

    spec = type("Spec", (TorchSpec,), {"create": classmethod(lambda cls, device, options: Drifting(device, options))})
    (result,) = run(spec, [CASES["L5.deterministic.repeat.lse.decode"]])
    assert (result.outcome, len(calls)) == ("failed", 3)
    assert "other bits" in result.reason
