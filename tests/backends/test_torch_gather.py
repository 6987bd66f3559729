"""Blocks gathered from views of any strides, against one element at a time."""

import pytest
import torch
from kvcore_torch.gather import gather
from kvcore_torch.tile_schedule import Sequence

BLOCKS, HEADS, SIZE, DIM = 6, 3, 4, 5
PAGE = HEADS * SIZE * DIM
# Strides of (block, head, token, dim).
STRIDES = {
    "dense": (PAGE, SIZE * DIM, DIM, 1),
    "page of two fields": (2 * PAGE, SIZE * DIM, DIM, 1),
    "block padded by less than a head": (PAGE + 8, SIZE * DIM, DIM, 1),
    "head padded": (HEADS * 32, 32, DIM, 1),
    "token padded": (HEADS * SIZE * 8, SIZE * 8, 8, 1),
    "token padded, heads inside": (HEADS * SIZE * DIM, DIM, HEADS * DIM, 1),
    # The heads are as far apart as in a dense page, and one thing inside them is not dense.
    "tokens interleaved with heads": (4 * PAGE, SIZE * DIM, 3 * SIZE * DIM, 1),
    "elements apart": (2 * PAGE, 2 * SIZE * DIM, 2 * DIM, 2),
    "elements are the slow axis": (PAGE, SIZE * DIM, 1, SIZE),
}

EVEN = ("dense", "page of two fields")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("head_first", [True, False], ids=["head_first", "token_first"])
def test_any_strides(strides, head_first, dtype):
    steps = STRIDES[strides]
    raw = torch.randn(BLOCKS * steps[0] + 4 * PAGE).to(dtype)
    field_NKPD = raw.as_strided((BLOCKS, HEADS, SIZE, DIM), steps, 3)
    sequence = Sequence(torch.tensor([4, 0, 5, 4]), slice(1, 14), ())
    got = gather(
        field_NKPD if head_first else field_NKPD.transpose(1, 2), sequence, torch.float64, head_first=head_first
    )
    want = torch.empty(HEADS, 13, DIM, dtype=torch.float64)
    for token in range(1, 14):
        block, offset = [4, 0, 5, 4][token // SIZE], token % SIZE
        for head in range(HEADS):
            for d in range(DIM):
                at = 3 + block * steps[0] + head * steps[1] + offset * steps[2] + d * steps[3]
                want[head, token - 1, d] = raw[at].double()
    assert torch.equal(got, want)
    assert got.stride(-1) == 1
    # One pass over the bytes wherever the rows of all heads are evenly spaced.
    assert bool(sequence._rows) == (head_first and strides in EVEN)


def test_rows_are_kept_for_each_pitch():
    """Layers of one step share them; a layer whose blocks are further apart has its own."""
    sequence = Sequence(torch.tensor([2, 1]), slice(0, 8), ())
    near, far = sequence.head_rows(3, 2), sequence.head_rows(6, 2)
    assert near.tolist() == [6, 3, 7, 4]
    assert far.tolist() == [12, 6, 13, 7]
    assert sequence.head_rows(3, 3).tolist() == [6, 3, 7, 4, 8, 5]
    assert sequence.head_rows(3, 2) is near
