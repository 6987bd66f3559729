"""vLLM with our backends in its engine gives the tokens of vLLM with its own; run by `make test-engines`."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest
from conformance.mutants import mutant, table
from plugins.vllm import jobs
from plugins.vllm.serving import PYTHON, first_difference, installed, near_tie, serve, server

pytestmark = pytest.mark.skipif(PYTHON not in os.environ, reason="make test-engines names a Python with vLLM")
# Kernel blocks of half of vLLM's blocks.
CUT = "backends.torch.kernel_block_size=16"
FAULTS = {"window_off_by_one": "mistral_window", "prefill_sees_only_itself": "gpt_oss"}
# Tiny models as they are; with smaller kernel blocks; with windows and full layers in one group of blocks.
SAME = [(name, "torch") for name in jobs.TINY] + [("gemma2", "cut"), ("gemma3_64", "cut"), ("gemma3_64", "one group")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def asked(folder):
    """A job for each model."""
    return {"smollm2": jobs.smollm2(), **jobs.tiny(folder)}


@pytest.fixture(scope="module")
def planted(folder):
    """Backends of the kit's mutants, and the one that they were made of, as installed plugins."""
    known = {m.name: m for m in table.MUTANTS}
    made = {"unhurt": {}} | {name: {known[name].file: known[name].source()} for name in FAULTS}
    spec = (mutant.HERE / "victim" / "spec.py").read_text()
    for name, changed in made.items():
        package = f"planted_{name}"
        renamed = spec.replace('name = "reference"', f'name = "{package}"')
        mutant.load(package, {"spec.py": renamed} | changed, folder)
        plugin = f"import kvcore.backend as kv\nfrom {package}.spec import ReferenceSpec\n\n"
        plugin += "@kv.hookimpl\ndef kvcore_backends():\n    return (ReferenceSpec,)\n"
        (folder / package / "plugin.py").write_text(plugin)
        installed(folder, f"{package}.plugin", package)
    return folder


@pytest.fixture(scope="module")
def served(repo, folder, asked, planted):
    """What vLLM answers, and what it answers with our backends: in two processes at once, mostly of one thread."""
    example = repo / "docs" / "examples" / "kvcore-example"
    installed(folder, "kvcore_example.plugin", "example")
    wanted = {("smollm2", b): {"backend": b} for b in ("torch", "vllm_cpu", "example")}
    wanted |= {(name, "torch"): {"backend": "torch"} for name in jobs.TINY}
    wanted |= {(name, "cut"): {"backend": "torch", "options": CUT} for name, b in SAME if b == "cut"}
    together = jobs.LIMITS | {"disable_hybrid_kv_cache_manager": True}
    wanted[("gemma3_64", "one group")] = {"backend": "torch", "engine": together}
    wanted |= {(name, "unhurt"): {"backend": "planted_unhurt"} for name in FAULTS.values()}
    wanted |= {(name, fault): {"backend": f"planted_{fault}"} for fault, name in FAULTS.items()}
    wanted |= {("gemma2", "example"): {"backend": "example"}, ("mistral_window", "no_such"): {"backend": "no_such"}}
    ours = [asked[n] | more for (n, _), more in wanted.items()]
    with ThreadPoolExecutor() as pool:
        by_itself = pool.submit(serve, repo, folder, "own", list(asked.values()))
        with_ours = pool.submit(serve, repo, folder, "ours", ours, example, planted)
        return (dict(zip(asked, by_itself.result(), strict=True)), dict(zip(wanted, with_ours.result(), strict=True)))


@pytest.fixture(scope="module")
def own(served):
    """What vLLM answers by itself, by model."""
    return served[0]


@pytest.fixture(scope="module")
def ours(served):
    """What it answers with our backends, by model and backend."""
    return served[1]


def same_tokens(repo, folder, job, mine, theirs):
    """Equal, or apart where vLLM's own two best are a near tie; there its token is forced upon ours, which goes on."""
    rows = {row: (0, tokens) for row, tokens in enumerate(mine["tokens"])}
    for number in range(4):
        begins = {}
        for row, (start, tokens) in rows.items():
            at = first_difference(tokens, theirs["tokens"][row][start:])
            if at is not None:
                assert near_tie(theirs, row, start + at), f"prompt {row}, token {start + at}"
                begins[row] = start + at + 1
        begins = {row: at for row, at in begins.items() if at < len(theirs["tokens"][row])}
        if not begins:
            return
        forced = [
            job
            | {"prompts": [job["prompts"][row] + theirs["tokens"][row][:at]], "tokens": len(theirs["tokens"][row]) - at}
            for row, at in begins.items()
        ]
        answers = serve(repo, folder, f"forced-{number}", forced)
        rows = {row: (at, a["tokens"][0]) for (row, at), a in zip(begins.items(), answers, strict=True)}
    pytest.fail("one near tie after the other")


@pytest.mark.parametrize("backend", ["torch", "vllm_cpu", "example"])
def test_smollm2_gives_vllms_own_tokens(repo, folder, asked, own, ours, backend):
    mine = ours["smollm2", backend]
    assert mine["implementations"] == ["KvcoreLayer"]
    assert own["smollm2"]["implementations"] == ["CPUAttentionBackendImpl"]
    (line,) = mine["said"]
    assert f"kvcore's backend {backend} serves 30 layers: layout " in line
    same_tokens(repo, folder, asked["smollm2"] | {"backend": backend}, mine, own["smollm2"])


@pytest.mark.parametrize(("name", "backend"), SAME)
def test_windows_soft_cap_and_sinks_give_vllms_own_tokens(repo, folder, asked, own, ours, name, backend):
    mine = ours[name, backend]
    assert mine["implementations"] == ["KvcoreLayer"]
    size = 16 if backend == "cut" else jobs.LIMITS["block_size"]
    (line,) = mine["said"]
    assert line.endswith(f"layout hnd in blocks of {size} tokens")
    options = {"backend": "torch", "options": CUT if backend == "cut" else ""}
    same_tokens(repo, folder, asked[name] | options, mine, own[name])


def test_prefixes_are_reused(own, ours):
    assert max(own["gpt_oss"]["cached"]) == 64
    assert ours["gpt_oss", "torch"]["cached"] == own["gpt_oss"]["cached"]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_changes_vllms_tokens(own, ours, fault):
    name = FAULTS[fault]
    assert ours[name, "unhurt"]["tokens"] == own[name]["tokens"]
    assert ours[name, fault]["tokens"] != own[name]["tokens"]


def test_what_a_backend_refuses_ends_the_start(ours):
    assert ours["gemma2", "example"]["error"] == "BackendUnsupportedError"
    assert "softcap" in ours["gemma2", "example"]["message"]
    assert ours["mistral_window", "no_such"]["error"] == "UnknownBackendError"


def test_the_server_with_its_worker_processes_gives_the_same_tokens(repo, folder, asked, own):
    job, log, count = asked["smollm2"], folder / "server.log", 16
    limits = ("--dtype", "float32", "--max-model-len", "512", "--max-num-seqs", "2", "--enforce-eager")
    body = {"model": job["model"], "prompt": job["prompts"][0], "max_tokens": count, "temperature": 0}
    with server(repo, log, "torch", job["model"], *limits) as post:
        answer = post("/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})
    assert answer["choices"][0]["token_ids"] == own["smollm2"]["tokens"][0][:count]
    (line,) = [line for line in log.read_text().splitlines() if "kvcore's backend torch serves 30 layers" in line]
    assert line.startswith("(Worker ")


def test_the_installed_vllm_has_the_signatures_that_are_known(ours):
    """`ours` was served: `register` compares them, and would have ended the process."""
    assert ours["smollm2", "torch"]["tokens"]
