"""A sweep of plans ends in one table and a plot of tokens against length."""

import json

import pytest

from kvcore.cli import main
from kvcore.cli.sweep_table import HEIGHT, plot, summarize, sweep_rows, table

SWEEP = ("plan", "-m", "device=h100-80gb", "backend=triton", "cache.dtype=bfloat16,fp8_e4m3", "cache.block_size=16,64")


def job(overrides, status=0, **plan):
    figures = {
        "placement": "slots",
        "bytes_per_token": 8,
        "tokens": 1000,
        "max_concurrency": 2,
        "fits": True,
        "max_model_len_fits": 500,
        "waste_fraction": 0.125,
        "simultaneous": {},
    }
    return {"overrides": overrides, "status": status, "result": figures | plan}


def test_a_sweep_ends_in_a_table_and_a_plot(capsys):
    assert main([*SWEEP, "output=json"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = document["table"]
    assert [row["overrides"] for row in rows] == [
        [f"cache.dtype={dtype}", f"cache.block_size={size}"] for dtype in ("bfloat16", "fp8_e4m3") for size in (16, 64)
    ]
    for row, done in zip(rows, document["jobs"], strict=True):
        assert row["tokens"] == done["result"]["tokens"]
        assert row["tokens_by_length"] == {
            length: int(length) * count for length, count in done["result"]["simultaneous"].items()
        }
    assert main(list(SWEEP)) == 0
    last = capsys.readouterr().out.rpartition("=== ")[2]
    assert "tokens of whole sequences at once, by their length" in last
    assert all(f"\n{mark}  cache.dtype=" in last for mark in "abcd")


def test_what_is_refused_stands_in_the_table(capsys):
    words = ["plan", "-m", "device=h100-80gb", "backend=flash_attn", "cache.block_size=256,24", "output=json"]
    assert main(words) == 2
    good, bad = json.loads(capsys.readouterr().out)["table"]
    assert (good["error"], good["fits"]) == (None, True)
    assert "placement" not in bad
    assert "flash_attn cannot serve" in bad["error"]


def test_columns_are_as_wide_as_their_longest_cell():
    rows = sweep_rows([job(["x=1", "a=1"], tokens=12_345_678), job(["x=1", "a=22222"], 1, fits=False)])
    head, first, second = table(rows)
    assert [row.overrides for row in rows] == [("a=1",), ("a=22222",)]
    assert first.index("12,345,678") == second.index("1,000") == head.index("tokens")
    assert "12.50%" in first
    assert (first.split()[-3], second.split()[-3]) == ("yes", "no")


@pytest.mark.parametrize(("tokens", "level"), [(1200, HEIGHT), (600, HEIGHT // 2), (0, 0)])
def test_a_letter_stands_at_its_height(tokens, level):
    rows = sweep_rows([job(["a=1"], simultaneous={"100": 12}), job(["a=2"], simultaneous={"100": tokens // 100})])
    lines = plot(rows)[1 : HEIGHT + 2]
    assert "b" in lines[HEIGHT - level]
    assert lines[0].startswith("1,200 |")
    assert "a" in lines[0]


def test_a_sweep_of_nothing_that_fits_has_no_plot():
    document, text = summarize([job(["a=1"], 1, simultaneous={"100": 0})])
    assert document["table"][0]["tokens_by_length"] == {100: 0}
    assert "no plot" in text
