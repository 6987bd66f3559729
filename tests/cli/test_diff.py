"""`kvcore diff`: two right backends agree, and a planted fault is found at its layer, token and head."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kvcore_torch.backend import TorchBackend
from kvcore_torch.declaration import TorchBackendSpec
from models.tiny import tiny_model
from support.engines import engine_settings

from kvcore.cli import main
from kvcore.diff.divergence import Divergence, OutputRow
from kvcore.diff.model import diff_model
from kvcore.engine.settings import SamplingParams
from kvcore.errors import BackendError
from kvcore.registry.loader import load
from kvcore.registry.records import PluginSource, installed_sources
from kvcore.registry.registry import Registry

PROMPTS = ((5, 9, 200, 31, 7) * 9, (17, 3, 44), (44, 2, 91) * 7)
LIMITS = {"max_model_len": 96, "num_blocks": 60, "max_num_batched_tokens": 16, "max_num_seqs": 4}


class WrongAnswer(TorchBackend):
    """Adds 0.01 to one head of the query at `position`, in one layer and all later ones."""

    layer, position, head = 1, 50, 2

    def prepare(self, batch: Any, group: Any) -> Any:
        self.batch = batch
        return super().prepare(batch, group)

    def attend(self, layer: Any, query: Any, cache: Any, metadata: Any, out: Any, lse: Any = None) -> None:
        super().attend(layer, query, cache, metadata, out, lse)
        starts, computed = self.batch.query_start_loc_host, self.batch.num_computed_host
        for s in range(self.batch.num_seqs):
            row = int(starts[s]) + self.position - int(computed[s])
            if starts[s] <= row < starts[s + 1] and layer.cache_id.layer >= self.layer:
                out[row, self.head :] += 0.01


class WrongWrite(TorchBackend):
    """Stores another value for the fourth token of a step, in layer 0: the queries from there on see it."""

    def write(self, layer: Any, tensors: Any, cache: Any, metadata: Any) -> None:
        value = tensors["v"].clone()
        if layer.cache_id.layer == 0 and len(value) > 3:
            value[3, 0] += 0.5  # KV head 0 alone
        super().write(layer, {"k": tensors["k"], "v": value}, cache, metadata)


class Raises(TorchBackend):
    """Fails in layer 1."""

    def attend(self, layer: Any, *rest: Any) -> None:
        if layer.cache_id.layer == 1:
            raise RuntimeError("no such kernel")
        super().attend(layer, *rest)


def planted(backend: type[TorchBackend]) -> type[TorchBackendSpec]:
    class Spec(TorchBackendSpec):
        name = backend.__name__.lower()

        @classmethod
        def create(cls, device: str, options: Any) -> TorchBackend:
            return backend(device, options)

    return Spec


@pytest.fixture(scope="module")
def registry(repo: Path) -> Iterator[Registry]:
    """What is installed, the example of the docs, and two broken backends."""
    sys.path.insert(0, str(repo / "docs" / "examples" / "kvcore-example"))
    example = lambda: import_module("kvcore_example.plugin")  # noqa: E731
    found = load([*installed_sources(), PluginSource("example", "kvcore-example", "1.0", example)])
    # Put in by hand: a declaration beside torch code is no plugin that could be loaded.
    found.backends |= {spec.name: spec for spec in map(planted, (WrongAnswer, WrongWrite, Raises))}
    yield found
    sys.path.pop(0)
    for name in [n for n in sys.modules if n.startswith("kvcore_example")]:
        del sys.modules[name]


def model_diff(name: str, sides: tuple[str, str], registry: Registry, where: Path, **keys: Any) -> Divergence:
    settings = engine_settings(tiny_model(name, where), **{**LIMITS, **keys})
    return diff_model(settings, sides, registry, PROMPTS, SamplingParams(max_tokens=8, ignore_eos=True))


@pytest.fixture(scope="module")
def where(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


@pytest.mark.parametrize("model", ["llama", "mistral_window"])
def test_two_right_backends_agree_on_a_model(model: str, registry: Registry, where: Path) -> None:
    divergence = model_diff(model, ("torch", "example"), registry, where)
    assert divergence.equal
    assert divergence.first is None
    # All layers of all tokens: 3 prompts, and 7 of 8 sampled tokens are fed again.
    facts = engine_settings(tiny_model(model, where)).facts
    per_token = sum(q.num_heads * q.head_dim_v for q in facts.queries.values())
    assert divergence.compared == per_token * sum(len(p) + 7 for p in PROMPTS)
    assert 0 < divergence.max_abs_error < 1e-4


def test_blocks_of_unlike_kernel_size_and_preemption(registry: Registry, where: Path) -> None:
    """The second side works in kernel blocks of its own; five blocks make the first preempt."""
    settings = engine_settings(
        tiny_model("llama", where),
        **{**LIMITS, "num_blocks": 7, "block_size": 16, "max_model_len": 64},
        options={"torch": {"kernel_block_size": 4}},
    )
    prompts = tuple((10 + i, 20 + i, 30 + i) * 9 for i in range(3))
    divergence = diff_model(settings, ("torch", "example"), registry, prompts, SamplingParams(max_tokens=20))
    assert divergence.equal
    assert divergence.compared > 0


@pytest.mark.parametrize("flip", [False, True])
def test_a_wrong_answer_is_found_where_it_is(registry: Registry, where: Path, flip: bool) -> None:
    sides = ("wronganswer", "torch") if flip else ("torch", "wronganswer")
    divergence = model_diff("llama", sides, registry, where)
    assert not divergence.equal
    # Position 50 is reached by the longest prompt (45 tokens) alone, while it decodes.
    assert divergence.first is not None
    assert divergence.first[:4] == (1, 50, 2, 0)
    assert divergence.first_error == pytest.approx(0.01, rel=1e-2)
    assert divergence.max_abs_error == pytest.approx(0.01, rel=0.1)
    assert divergence.first_tolerance < 0.001


def test_a_wrong_write_is_found_at_the_first_query_that_sees_it(registry: Registry, where: Path) -> None:
    divergence = model_diff("llama", ("torch", "wrongwrite"), registry, where)
    # The first step is 16 tokens of the first prompt. KV head 0 serves query heads 0 and 1; one of the two
    # may give the token so little weight that nothing shows.
    assert divergence.first is not None
    assert divergence.first.head in (0, 1)
    assert divergence.first._replace(head=0) == OutputRow(layer=0, token=3, head=0, sequence=0, step=1)


def test_a_backend_that_raises_is_named_with_its_layer(registry: Registry, where: Path) -> None:
    with pytest.raises(BackendError, match="Raises raised in layer 1: RuntimeError: no such kernel"):
        model_diff("llama", ("torch", "raises"), registry, where)


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, registry: Registry, capsys: pytest.CaptureFixture[str]) -> Any:
    monkeypatch.setattr("kvcore.registry.loader.installed", lambda: registry)

    def run(*words: str) -> tuple[int, dict[str, Any]]:
        status = main(["diff", "output=json", "device=cpu", *words])
        return status, json.loads(capsys.readouterr().out)

    return run


def test_one_batch_from_the_command_line(call: Any) -> None:
    status, document = call("a=torch", "b=example", "backends.example.x=8", "case=L2.attend.base.mixed")
    assert (status, document["equal"], document["first"]) == (0, True, None)
    assert 0 < document["max_abs_error"] < 1e-5
    status, document = call("a=torch", "b=wrongwrite", "case=L2.attend.base.mixed")
    # Two decodes, then a prefill: the fourth token of the step is position 1 of sequence 2.
    assert (status, document["equal"]) == (1, False)
    assert {k: document["first"][k] for k in ("layer", "token", "head", "sequence")} == {
        "layer": 0,
        "token": 1,
        "head": 0,
        "sequence": 2,
    }


def test_the_default_model_from_the_command_line(call: Any) -> None:
    words = ("--prompt", "What is the capital of France?", "sampling.max_tokens=2", "cache.memory=64MiB")
    status, document = call("a=torch", "b=example", *words, "engine.max_model_len=128")
    assert (status, document["equal"]) == (0, True)
    # 30 layers of 9 heads of 64; the prompt, in the chat template, and one of the two tokens are computed.
    assert document["compared"] % (30 * 9 * 64) == 0
    assert document["compared"] > 30 * 9 * 64 * 10
    assert 0 < document["max_abs_error"] < 1e-3


CONTENT = ("cache.content=normed_kv", "a=torch", "b=example")


def forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example's backend, without the one field that is its content's own."""
    backend = sys.modules["kvcore_example.backend"].ExampleBackend
    right = backend._gather

    def gather(name: str, cache: Any, blocks: Any) -> Any:
        return right(name, {n: view for n, view in cache.items() if n != "k_norm"}, blocks)

    monkeypatch.setattr(backend, "_gather", staticmethod(gather))


def test_a_content_of_one_s_own_on_a_case(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The side that does not take it stores plain keys and values, and the answer says so."""
    status, document = call(*CONTENT, "case=L2.attend.base.mixed")
    assert (status, document["equal"], document["stored"]) == (0, True, ["kv", "normed_kv"])
    forgets(monkeypatch)
    status, document = call(*CONTENT, "case=L2.attend.base.mixed")
    assert (status, document["first"]["token"]) == (1, 8)


def test_a_content_of_one_s_own_on_a_model(call: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--prompt", "Hello", "sampling.max_tokens=2", "cache.memory=64MiB", "engine.max_model_len=128")
    status, document = call(*CONTENT, *words)
    assert (status, document["equal"], document["stored"]) == (0, True, ["kv", "normed_kv"])
    forgets(monkeypatch)
    status, document = call(*CONTENT, *words)
    assert (status, document["first"]["layer"]) == (1, 0)


@pytest.mark.parametrize(
    ("words", "field"),
    [
        (("a=torch", "b=torch", "cache.content=normed_kv", "case=L2.attend.base.mixed"), "cache.content"),
        (("a=torch", "b=torch", "cache.content=normed_kv", "--prompt", "x"), "cache.content"),
        (("a=torch", "b=example", "cache.content=nothing", "case=L2.attend.base.mixed"), "cache.content"),
        ((*CONTENT, "case=L2.attend.base.mixed", "cache.memory=64MiB"), "case"),
        (("a=torch",), "b"),
        (("b=torch",), "a"),
        (("a=torch", "b=nosuch"), "b"),
        (("a=torch", "b=example", "case=L2.attend.base.mixd"), "case"),
        (("a=torch", "b=example", "backend=torch"), "backend"),
        (("a=torch", "b=example", "case=L2.attend.softcap=1.5.mixed"), "softcap"),
        (("a=torch", "b=example", "case=L2.attend.base.mixed", "--prompt", "x"), "case"),
        (("a=torch", "b=example", "backends.example.x=48", "case=L2.attend.base.mixed"), "head_dim"),
        (("a=torch", "b=example", "case=L2.attend.base.mixed", "device=h100-80gb"), "device"),
    ],
)
def test_bad_input_is_one_typed_error(call: Any, words: tuple[str, ...], field: str) -> None:
    status, document = call(*words)
    assert status == 2
    assert document["error"]["field"] == field


def test_divergence_takes_the_first_row_and_counts_what_is_not_finite() -> None:
    def locate(row: int, head: int) -> OutputRow:
        return OutputRow(3, row, head, 0, 1)

    a, b = np.zeros((4, 2, 3)), np.zeros((4, 2, 3))
    allowed = np.full(a.shape, 0.1)
    b[1, 1, 2], b[1, 0, 0], b[3] = 0.05, 0.2, 9.0
    divergence = Divergence()
    divergence.take(a, b, allowed, locate)
    assert divergence.first == OutputRow(3, 1, 0, 0, 1)
    assert (divergence.first_error, divergence.max_abs_error, divergence.compared) == (0.2, 9.0, 24)
    nan = Divergence()
    a[0], b[0] = np.nan, np.nan  # both: no divergence
    b[2, 1, 0] = np.nan
    nan.take(a[[0, 2]], b[[0, 2]], allowed[[0, 2]], locate)
    assert nan.first == OutputRow(3, 1, 1, 0, 1)
    assert nan.max_abs_error == np.inf
