"""Random overrides for every command: an answer or a typed error, within two seconds, never a bug of ours."""

import json
import os
import random
import string
import time

import pytest

from kvcore.cli import bench, conform, diff, main, run
from kvcore.cli.result import Result
from kvcore.config.keys import all_keys
from kvcore.registry.loader import installed

SECONDS = 5.0
# These would load weights or run kernels: what they do with their configuration is another room's test.
WORKING = {"run": run, "diff": diff, "conform": conform, "bench": bench}
COMMANDS = ("plan", "plan", "plan", "backends", "layout", "plugins", "env", *WORKING)
# Names of the parser's and Hydra's classes, which mean nothing to who typed the override.
CLASSES = ("omegaconf", "DictConfig", "ListConfig", "Exception", "antlr", "Lexer", "HydraError", "ValidationError")
CLASSES += ("Keys`", "object_type", "full_key", "Traceback", "<EOF>", "viable alternative")

WORDS = ("auto", "cpu", "torch", "triton", "none", "null", "true", "false", "nan", "inf", "-inf", "int8", "hnd", "???")
NUMBERS = (
    "0",
    "1",
    "-1",
    "16",
    "1.5",
    "1e3",
    "1e400",
    "-0.0",
    "2GiB",
    "0.5MiB",
    "1_000",
    "0x10",
    "2147483648",
    "9" * 25,
)
HUGE = (
    "9" * 4299,
    "'" + "9" * 4299 + "TiB'",
    "x" * 70_000,
    "~nobody/here",
    "9" * 5000,
    "1e9999999",
    "-" + "8" * 4500,
    "0." + "1" * 3000,
    "7" * 4500 + "GiB",
)
SIGNS = "=,()[]{}$'\"\\:;@~+#%&|<>*?/ \t"
LETTERS = string.ascii_letters + string.digits + "_.-" + "éß漢字🙂\u202e\u0000\u001b\udcff"
FUNCTIONS = ("int({})", "str({})", "float({})", "json_str({})", "bool({})", "cast({})", "extend_list({})")
SWEEPS = (
    "{},{}",
    "choice({},{})",
    "range(1,4)",
    "glob(*)",
    "interval(0,1)",
    "sort({},{})",
    "shuffle({},{})",
    "tag(a,{})",
)


def value(draw: random.Random, depth: int = 0) -> str:
    kind = draw.randrange(12 if depth < 4 else 6)
    if kind < 2:
        return draw.choice(WORDS)
    if kind < 4:
        return draw.choice(NUMBERS)
    if kind == 4:
        return "".join(draw.choices(LETTERS, k=draw.randrange(12)))
    if kind == 5:
        return draw.choice(("${nowhere}", "${cache.salt}", "${oc.env:HOME}", "${oc.env:NOPE}", "${a:${b}}", "${", "$"))
    if kind == 6:
        sign = draw.choice("'\"")
        return sign + value(draw, depth + 1) + draw.choice((sign, sign, sign, ""))
    if kind == 7:
        return "[" + ",".join(value(draw, depth + 1) for _ in range(draw.randrange(3))) + draw.choice(("]", "]", ""))
    if kind == 8:
        return "{" + ",".join(f"{draw.choice(WORDS)}:{value(draw, depth + 1)}" for _ in range(draw.randrange(3))) + "}"
    if kind == 9:
        return draw.choice(FUNCTIONS).format(value(draw, depth + 1))
    if kind == 10:
        return "".join(draw.choices(LETTERS + SIGNS, k=draw.randrange(20)))
    return draw.choice((draw.choice(HUGE), "[" * draw.choice((3, 50, 2000)), "{a:" * 300 + "1" + "}" * 300, "(" * 90))


def override(draw: random.Random, keys: list[str]) -> str:
    name = draw.choice(keys)
    kind = draw.randrange(10)
    if kind == 0:
        at = draw.randrange(len(name))
        name = name[:at] + draw.choice(LETTERS + SIGNS) + name[at + 1 :]
    elif kind == 1:
        name = draw.choice(("+", "++", "~", "", "-", "a.", "hydra.", "@")) + name
    elif kind == 2:
        name = draw.choice((name.rpartition(".")[0], name + ".more", name + "@there", "model.geometry." + name))
    said = draw.choice(SWEEPS).format(value(draw), value(draw)) if draw.randrange(6) == 0 else value(draw)
    return name if draw.randrange(40) == 0 else f"{name}={said}"


def choices_of(draw: random.Random, key) -> str:
    near = key.default if key.default is None or key.default else draw.choice(("", 1, 32, "auto"))
    return f"{key.path}={draw.choice(key.choices)}" if key.choices else f"{key.path}={'null' if near is None else near}"


def command_line(draw: random.Random, keys) -> list[str]:
    names = [k.path for k in keys] + [
        "model",
        "device",
        "backends/torch",
        "backends/triton",
        "model.geometry.model_type",
    ]
    words = [draw.choice(COMMANDS)]
    words += [override(draw, names) for _ in range(draw.choice((0, 1, 1, 2, 3)))]
    words += [choices_of(draw, draw.choice(keys)) for _ in range(draw.randrange(3))]
    if draw.randrange(8) == 0:
        words.append("-m")
    if draw.randrange(2):
        words.append("output=json")
    return words


def check(seed: int, count: int, capsys, monkeypatch) -> None:
    for module in WORKING.values():
        monkeypatch.setattr(module, "execute", lambda job: Result({}, ""))
    monkeypatch.setenv("KVCORE_DEBUG", "")
    draw, keys = random.Random(seed), all_keys(installed())
    main(["plan", "device=cpu"])  # what is loaded once is not the override's time
    capsys.readouterr()
    before = sorted(os.listdir())
    answered = 0
    for number in range(count):
        words = command_line(draw, keys)
        shown = f"case {number} of seed {seed}: {[w[:200] for w in words]!a}"
        started = time.perf_counter()
        status = main(words)
        seconds = time.perf_counter() - started
        said = capsys.readouterr()
        assert status in (0, 1, 2), f"{shown}: status {status}, {said.err[-500:]}"
        jobs = max(1, said.out.count('"overrides"')) if "-m" in words else 1
        assert seconds < SECONDS * jobs, f"{shown}: {seconds:.1f} s"
        if status == 2:
            wrong = [c for c in CLASSES if c in said.err.partition("; got: ")[0]]
            assert not wrong, f"{shown}: {wrong} in {said.err[:500]}"
        elif "-m" not in words:
            answered += 1
        if "output=json" in words and words[-1] == "output=json":
            json.loads(said.out)
    assert sorted(os.listdir()) == before
    assert answered > count // 50, "hardly any of them is an answer: the test tests one refusal"


def test_a_hundred_random_overrides(capsys, monkeypatch):
    check(9, 100, capsys, monkeypatch)


@pytest.mark.long
def test_a_thousand_random_overrides(capsys, monkeypatch):
    check(90, 1000, capsys, monkeypatch)
