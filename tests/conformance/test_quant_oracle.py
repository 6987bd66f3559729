"""Reference encodings against torch's own types and against the definition."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcore.spec.content import KVHeads, Quant
from kvcore.testing.oracle.quant import decode, encode, fp8_values, write_problem

FP8 = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
INT8 = KVHeads(2, 8, dtype="int8", quant=Quant("token_head"))
E4M3 = KVHeads(2, 8, dtype="fp8_e4m3", quant=Quant("tensor"))


@pytest.mark.parametrize("name", FP8)
def test_all_codes(name):
    codes = torch.arange(256, dtype=torch.uint8).view(FP8[name]).double().numpy()
    np.testing.assert_array_equal(fp8_values(name), codes)


def test_e4m3_rounds_as_torch_does_and_saturates():
    rng = np.random.default_rng(0)
    table = fp8_values("fp8_e4m3")
    finite = np.unique(table[np.isfinite(table)])
    values = np.concatenate([rng.standard_normal(4000) * 60, finite, (finite[1:] + finite[:-1]) / 2])
    values = values[: len(values) // 16 * 16].reshape(-1, 2, 8)
    got = encode(E4M3, "k", values, np.array(1.0))["k"].view(torch.uint8)
    # float64 to float8 goes through float32 in torch, where these values are exact.
    want = torch.from_numpy(values).float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
    exact = torch.from_numpy(values.astype(np.float32).astype(np.float64) == values)
    assert torch.equal(got[exact], want[exact])
    top = encode(E4M3, "k", np.full((1, 2, 8), 1e6), np.array(0.5))
    assert (decode(E4M3, "k", top, np.array(0.5)) == 224).all()


def test_int8_by_hand():
    values = np.zeros((2, 2, 8))
    values[0, 0, :4] = [127.0, -63.5, 0.5, 1.5]
    fields = encode(INT8, "v", values, None)
    assert fields["v_scale"].tolist() == [[1.0, 0.0], [0.0, 0.0]]
    # Half to even: -63.5 to -64, 0.5 to 0, 1.5 to 2.
    assert fields["v"][0, 0].tolist() == [127, -64, 0, 2, 0, 0, 0, 0]
    assert (decode(INT8, "v", fields, None)[1] == 0).all()


@given(st.integers(0, 10_000))
def test_a_reference_encoding_has_no_problem_and_one_step_more_has(seed):
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((3, 2, 8)).astype(np.float32).astype(np.float64)
    for content, scale in ((INT8, None), (E4M3, np.array(0.3)), (KVHeads(2, 8, dtype="float16"), None)):
        fields = encode(content, "k", values, scale)
        assert write_problem(content, "k", values, fields, scale) is None
        wrong = {n: t.clone() for n, t in fields.items()}
        raw = wrong["k"].view(torch.int8)
        raw[1, 1, 3] += -1 if raw[1, 1, 3] > 0 else 1
        assert write_problem(content, "k", values, wrong, scale)


def test_a_scale_of_another_token_is_a_problem():
    values = np.random.default_rng(0).standard_normal((3, 2, 8))
    fields = encode(INT8, "k", values, None)
    fields["k_scale"] = fields["k_scale"].roll(1, 0)
    assert "k_scale" in write_problem(INT8, "k", values, fields, None)
