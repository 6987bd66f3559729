"""Runs models in vLLM, in a process and an environment of its own: python generate.py JOBS.json OUT.json.

A job: model, prompts (token ids), and what may be left out: tokens, backend, options, engine (arguments of `LLM`),
record. A result: tokens and, for each, how far the best log-probability lies above the second; the classes that served;
the log lines. A job that fails gives the error instead.
"""

from __future__ import annotations

import gc
import json
import logging
import os
import sys
import time
import traceback

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
LIMITS = {"max_model_len": 1024, "max_num_seqs": 16, "max_num_batched_tokens": 256}
FIXED = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", "enable_prefix_caching": True}


class Lines(logging.Filter):
    """What kvcore says in vLLM's log. A filter: vLLM takes handlers away when it sets up its own."""

    def __init__(self):
        super().__init__()
        self.lines = []
        logging.getLogger("vllm.kvcore").addFilter(self)

    def filter(self, record):
        self.lines.append(record.getMessage())
        return True


def serve(job):
    from vllm import LLM, SamplingParams

    if "backend" in job:
        os.environ["KVCORE_BACKEND"] = job["backend"]
        os.environ["KVCORE_OPTIONS"] = job.get("options", "")
    said, recorder = Lines(), None
    if job.get("record"):
        from record import Recorder

        recorder = Recorder()
    llm = LLM(model=job["model"], **FIXED | LIMITS | job.get("engine", {}))
    sampling = SamplingParams(
        temperature=0, max_tokens=job.get("tokens", 24), ignore_eos=True, detokenize=False, logprobs=2
    )
    begun = time.perf_counter()
    found = llm.generate([{"prompt_token_ids": p} for p in job["prompts"]], sampling, use_tqdm=False)
    seconds = time.perf_counter() - begun
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context.values()
    gaps = []
    for f in found:
        best = [sorted((x.logprob for x in step.values()), reverse=True) for step in f.outputs[0].logprobs]
        gaps.append([one - two for one, two, *_ in best])
    result = {
        "tokens": [list(f.outputs[0].token_ids) for f in found],
        "gaps": gaps,
        "cached": [f.num_cached_tokens for f in found],
        "implementations": sorted({type(m.impl).__name__ for m in layers if hasattr(m, "impl")}),
        "block_size": config.cache_config.block_size,
        "said": said.lines,
        "seconds": seconds,
    }
    if recorder is not None:
        result["record"] = recorder.written(llm)
    logging.getLogger("vllm.kvcore").removeFilter(said)
    del llm, config, layers
    return result


def clean():
    """Make place for the next engine of this process."""
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


def main(jobs, out):
    results = []
    with open(jobs) as file:
        wanted = json.load(file)
    for job in wanted:
        try:
            results.append(serve(job))
        except Exception as error:
            traceback.print_exc()
            results.append({"error": type(error).__name__, "message": str(error)})
        with open(out, "w") as file:  # after each: a process that dies leaves what was done
            json.dump(results, file)
        clean()


if __name__ == "__main__":
    main(*sys.argv[1:])
