"""vLLM with our backends in its engine gives the tokens of vLLM with its own; run by `make test-engines`."""

import os

import pytest
import torch
from conformance.mutants import mutant, table
from models.tiny import tiny_model
from models.tiny_specs import SPECS
from plugins.vllm.serving import PYTHON, first_difference, installed, near_tie, serve
from support.mt_bench import first_turns

from kvcore.models.home import ensure_model

pytestmark = pytest.mark.skipif(PYTHON not in os.environ, reason="make test-engines names a Python with vLLM")
NEW = 64
# Windows, soft-cap, sinks, ALiBi, with heads that vLLM's own CPU kernel has.
TINY = {
    "mistral_window": {"head_dim": 32},
    "gemma2": {"head_dim": 32, "query_pre_attn_scalar": 32},
    "gemma3_64": {},
    "gpt_oss": {"head_dim": 32},
}
SMALL = {"max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 48}
# vLLM's blocks of 32 tokens, cut into kernel blocks of 16.
CUT = {"engine": SMALL | {"block_size": 32}, "options": "backends.torch.kernel_block_size=16"}
FAULTS = {"window_off_by_one": "mistral_window", "prefill_sees_only_itself": "gemma3_64"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def questions():
    """The 16 prompts of MT-bench, as token ids of SmolLM2."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(ensure_model() / "tokenizer.json"))
    return [tokenizer.encode(text).ids for text in first_turns(16)]


@pytest.fixture(scope="module")
def tiny(folder):
    """A job for each tiny model, by name: prompts longer than a step has tokens, and one that begins like another."""
    torch.manual_seed(0)
    prompts = [torch.randint(1, 250, (n,)).tolist() for n in (90, 33, 20, 5)]
    prompts.append([*prompts[0][:70], 7, 8, 9])
    jobs = {}
    for name, changed in TINY.items():
        kind, given = SPECS[name]
        SPECS[f"{name}_in_vllm"] = (kind, {**given, **changed})
        model = tiny_model(f"{name}_in_vllm", folder)
        jobs[name] = {"model": str(model), "prompts": prompts, "engine": SMALL}
    return jobs


@pytest.fixture(scope="module")
def planted(folder):
    """Backends of the kit's mutants by name, and the one that they were made of."""
    made = {"unhurt": {}}
    known = {m.name: m for m in table.MUTANTS}
    made |= {name: {known[name].file: known[name].source()} for name in FAULTS}
    spec = (mutant.HERE / "victim" / "spec.py").read_text()
    for name, changed in made.items():
        package = f"planted_{name}"
        files = changed | {"spec.py": spec.replace('name = "reference"', f'name = "{package}"')}
        mutant.load(package, files, folder)
        lines = (
            "from kvcore.backend import hookimpl",
            f"from {package}.spec import ReferenceSpec",
            "@hookimpl",
            "def kvcore_backends():\n    return (ReferenceSpec,)",
        )
        (folder / package / "plugin.py").write_text("\n".join(lines) + "\n")
        installed(folder, f"{package}.plugin", package)
    return folder


@pytest.fixture(scope="module")
def own(repo, folder, questions, tiny):
    """What vLLM answers by itself."""
    jobs = {"smollm2": {"model": str(ensure_model()), "prompts": questions, "tokens": NEW}, **tiny}
    found = serve(repo, folder, "own", list(jobs.values()))
    return dict(zip(jobs, found, strict=True))


@pytest.fixture(scope="module")
def ours(repo, folder, questions, tiny, planted):
    """What it answers with our backends, by model and backend."""
    example = repo / "docs" / "examples" / "kvcore-example"
    installed(folder, "kvcore_example.plugin", "example")
    model = {"model": str(ensure_model()), "prompts": questions, "tokens": NEW}
    jobs = {("smollm2", b): model | {"backend": b} for b in ("torch", "vllm_cpu", "example")}
    jobs |= {(name, "torch"): job | {"backend": "torch"} for name, job in tiny.items()}
    jobs |= {(name, "cut"): tiny[name] | CUT | {"backend": "torch"} for name in ("gemma2", "gemma3_64")}
    jobs |= {(name, "unhurt"): tiny[name] | {"backend": "planted_unhurt"} for name in FAULTS.values()}
    jobs |= {(name, fault): tiny[name] | {"backend": f"planted_{fault}"} for fault, name in FAULTS.items()}
    jobs[("gemma2", "example")] = tiny["gemma2"] | {"backend": "example"}
    jobs[("smollm2", "no_such")] = model | {"backend": "no_such"}
    found = serve(repo, folder, "ours", list(jobs.values()), example, planted)
    return dict(zip(jobs, found, strict=True))


def same_tokens(repo, folder, job, mine, theirs):
    """Equal, or apart where vLLM's own two best are a near tie; there its token is forced on ours, which goes on."""
    rows = {i: (0, mine["tokens"][i]) for i in range(len(theirs["tokens"]))}
    for number in range(4):
        forced, more = {}, []
        for row, (start, tokens) in rows.items():
            text = theirs["tokens"][row]
            at = first_difference(tokens, text[start:])
            if at is None:
                continue
            assert near_tie(theirs, row, start + at), f"prompt {row}, token {start + at}"
            forced[row] = start + at + 1
            more.append(
                job | {"prompts": [job["prompts"][row] + text[: start + at + 1]], "tokens": len(text) - start - at - 1}
            )
        if not more:
            return
        answers = serve(repo, folder, f"forced-{number}", more) if all(m["tokens"] for m in more) else []
        rows = {row: (start, a["tokens"][0]) for (row, start), a in zip(forced.items(), answers, strict=False)}
    pytest.fail("one near tie after the other")


@pytest.mark.parametrize("backend", ["torch", "vllm_cpu", "example"])
def test_smollm2_gives_vllms_own_tokens(repo, folder, own, ours, questions, backend):
    mine = ours["smollm2", backend]
    assert mine["implementations"] == ["KvcoreLayer"]
    assert own["smollm2"]["implementations"] == ["CPUAttentionBackendImpl"]
    assert f"kvcore's backend {backend} serves 30 layers (full)" in mine["said"][0]
    job = {"model": str(ensure_model()), "prompts": questions, "tokens": NEW, "backend": backend}
    same_tokens(repo, folder, job, mine, own["smollm2"])


@pytest.mark.parametrize("backend", ["torch", "cut"])
@pytest.mark.parametrize("name", TINY)
def test_windows_soft_cap_and_sinks_give_vllms_own_tokens(repo, folder, own, ours, tiny, name, backend):
    if (name, backend) not in ours:
        pytest.skip("two models are cut")
    mine = ours[name, backend]
    assert "error" not in mine, mine
    assert mine["implementations"] == ["KvcoreLayer"]
    assert all(f"blocks of {16 if backend == 'cut' else 128} tokens" in line for line in mine["said"])
    same_tokens(repo, folder, tiny[name] | {"backend": "torch"}, mine, own[name])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_vllms_tokens(own, ours, fault):
    name = FAULTS[fault]
    assert ours[name, "unhurt"]["tokens"] == own[name]["tokens"]
    assert ours[name, fault]["tokens"] != own[name]["tokens"]


def test_prefixes_were_reused(own, ours):
    assert all(max(run["cached"]) >= 0 for run in own.values())


def test_what_a_backend_refuses_ends_the_start(ours):
    assert ours["gemma2", "example"]["error"] == "BackendUnsupportedError"
    assert "softcap" in ours["gemma2", "example"]["message"]
    assert ours["smollm2", "no_such"]["error"] == "UnknownBackendError"
