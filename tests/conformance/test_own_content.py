"""A content of one's own is proven: it agrees with itself, and a backend is held to what it says."""

import sys
from dataclasses import dataclass
from importlib import import_module

import pytest

import kvcore.backend as kv
from kvcore.testing import run
from kvcore.testing.checks.runner import selected

FEW = {"phase": "mixed", "mask": "causal", "context": "1-256", "sequences": "1-8", "heads": "1-16", "rows": "2-64"}
ASK = {"where": FEW}


@pytest.fixture(scope="module")
def example(repo):
    """Declaration, content and backend of the tutorial."""
    folder = str(repo / "docs" / "examples" / "kvcore-example")
    sys.path.insert(0, folder)
    yield {name: import_module(f"kvcore_example.{name}") for name in ("spec", "storage", "backend")}
    sys.path.remove(folder)
    for name in [n for n in sys.modules if n.startswith("kvcore_example")]:
        del sys.modules[name]


def failures(spec, content, **ask):
    return {r.case.id: r.reason for r in run(spec, content=content, **(ask or ASK)) if r.outcome == "failed"}


def test_the_tutorial_s_content_is_proven(example):
    content = example["storage"].NormedKV
    results = run(example["spec"].ExampleSpec, content=content, level="fast")
    assert [(r.case.id, r.reason) for r in results if r.outcome == "failed"] == []
    passed = [r.case for r in results if r.outcome == "passed"]
    assert {c.check for c in passed} >= {"content", "write", "copies", "attend", "padded", "steps", "placement"}
    assert all(c.content().kind == "normed_kv" and c.query().content == "normed_kv" for c in passed if c.seqs)


def wrong_content(plain, what):
    """The tutorial's content with one thing wrong."""

    class Wrong(plain):
        def fields(self):
            if what == "a norm for all heads":
                return (*super().fields()[:2], kv.LogicalField("k_norm", (("head", 1),), self.dtype))
            if what == "a norm of half precision":
                return (*super().fields()[:2], kv.LogicalField("k_norm", (("head", self.num_kv_heads),), "float16"))
            if what == "a field that nobody fills":
                return (*super().fields(), kv.LogicalField("v_norm", (("head", self.num_kv_heads),), self.dtype))
            return super().fields()

        def encode(self, values):
            found = dict(super().encode(values))
            if what == "values are stored as keys":
                found["v"] = found["k"]
            if what == "the norm is squared":
                found["k_norm"] = found["k_norm"] ** 2
            return found

        def decode(self, fields):
            found = dict(super().decode(fields))
            if what == "the norm is not applied":
                found["k"] = fields["k"].double()
            return found

    return Wrong


@pytest.mark.parametrize(
    "what",
    [
        "a norm for all heads",
        "a norm of half precision",
        "a field that nobody fills",
        "values are stored as keys",
        "the norm is squared",
        "the norm is not applied",
    ],
)
def test_a_wrong_field_dies(example, what):
    spec, wrong = example["spec"].ExampleSpec, wrong_content(example["storage"].NormedKV, what)
    (case,) = (c for c in selected(spec, content=wrong) if c.check == "content")
    (result,) = run(spec, [case])
    assert result.outcome == "failed"
    assert any(word in result.reason for word in ("encode gives", "decode(encode(", "declared"))


def wrong_backend(example, **methods):
    backend = type("Wrong", (example["backend"].ExampleBackend,), methods)

    class WrongSpec(example["spec"].ExampleSpec):
        @classmethod
        def create(cls, device, options):
            return backend(device, options)

    return WrongSpec


def test_a_backend_that_fills_a_field_wrongly_dies(example):
    """It reads what it writes, so that its attention alone looks right."""

    def write(self, layer, tensors, cache, metadata):
        without = {name: view for name, view in cache.items() if name != "k_norm"}
        example["backend"].ExampleBackend.write(self, layer, tensors, without, metadata)
        slots = metadata.tables.slot_mapping_T
        used = slots[slots >= 0]
        size = metadata.tables.kernel_block_size
        cache["k_norm"][used // size, :, used % size] = 1.0

    found = failures(wrong_backend(example, write=write), example["storage"].NormedKV)
    assert "field k is not what the content encodes" in found["L1.write.base.mixed"]


def test_a_backend_that_reads_a_field_wrongly_dies(example):
    gather = example["backend"].ExampleBackend._gather

    def forgets(name, cache, blocks):
        return gather(name, {n: v for n, v in cache.items() if n != "k_norm"}, blocks)

    found = failures(wrong_backend(example, _gather=staticmethod(forgets)), example["storage"].NormedKV)
    assert "L2.attend.base.mixed" in found
    assert "L1.copies.base.mixed" in found
    assert not [case for case in found if case.startswith("L1.write")]


def test_a_layout_that_forgets_a_field_dies(example):
    class Forgets(example["spec"].ExampleSpec):
        @classmethod
        def layouts(cls, spec, facts, options):
            plain = kv.KVHeads(
                spec.content.num_kv_heads, spec.content.head_dim, spec.content.head_dim_v, spec.content.dtype
            )
            return super().layouts(kv.KVCacheSpec(plain, spec.retention), facts, options)

    found = failures(Forgets, example["storage"].NormedKV, level="fast")
    assert "L0.layouts" in found


def test_one_that_is_read_as_written(example):
    @dataclass(frozen=True)
    class Tagged(kv.KVHeads):
        """Keys and values as they come, and a tag that only the backend reads."""

        kind = "normed_kv"
        read_as_written = True

        @classmethod
        def instead_of(cls, content):
            plain = type(content) is kv.KVHeads and content.quant is None
            return cls(content.num_kv_heads, content.head_dim, content.head_dim_v, content.dtype) if plain else None

    assert failures(example["spec"].ExampleSpec, Tagged) == {}


def test_one_that_says_nothing(example):
    class Silent(example["storage"].NormedKV):
        encode = kv.Content.encode

    found = failures(example["spec"].ExampleSpec, Silent, level="fast")
    assert "does not say how it is encoded" in found["L0.content"]
    assert "read_as_written = True" in found["L0.content"]


def test_who_does_not_take_it_is_asked_nothing(example):
    (result,) = run("torch", content=example["storage"].NormedKV)
    assert (result.case.id, result.outcome) == ("L0.content", "unsupported")
    assert "content=normed_kv" in result.reason


def test_quantized_caches_and_latents_are_left_out(example):
    found = selected(example["spec"].ExampleSpec, content=example["storage"].NormedKV, level="full")
    assert {c.quant for c in found} == {None}
    assert {c.stores for c in found} == {"kv"}
