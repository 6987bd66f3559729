"""What a decode step of vLLM costs on its own attention, and on the same kernels through `kvcore_vllm`.

Run in an environment with vLLM (`make test-engines` makes `.venv-vllm`), from the root of the checkout:

    PYTHONPATH=.:backends:plugins .venv-vllm/bin/python tests/benchmarks/bench_vllm_bridge.py MODEL

Times of one step on the host: building its metadata, and all layers' writes and attention. Through the bridge the
backend's own calls are timed apart, so that what is left is the bridge. Medians over the decode steps.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict

SEQS, PROMPT, NEW = 8, 64, 32
SIDES = ("", "vllm_cpu", "torch")


class Clock:
    """Adds up the seconds of some methods, step by step."""

    def __init__(self):
        self.now, self.steps = defaultdict(float), []

    def watch(self, owner, name, label):
        """Time a method of a class or an object; a method inside another counts in both."""
        method = getattr(owner, name)

        def timed(*arguments, **more):
            begun = time.perf_counter()
            result = method(*arguments, **more)
            self.now[label] += time.perf_counter() - begun
            return result

        setattr(owner, name, timed)

    def end(self):
        self.steps.append(dict(self.now))
        self.now.clear()


def measure(model, backend):
    """Medians of one side, in microseconds a decode step."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    if backend:
        os.environ["KVCORE_BACKEND"] = backend
    from vllm import LLM, SamplingParams

    limits = {"max_model_len": 512, "max_num_seqs": SEQS, "max_num_batched_tokens": SEQS * PROMPT}
    llm = LLM(model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, **limits)
    clock = Clock()
    layers = [m.impl for m in llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()]
    if backend:
        from kvcore_vllm.builder import StepBuilder
        from kvcore_vllm.layer import KvcoreLayer
        from kvcore_vllm.serving import chosen

        clock.watch(StepBuilder, "build", "build")
        clock.watch(KvcoreLayer, "forward", "layers")
        for name in ("prepare", "write", "attend"):
            clock.watch(chosen().backend, name, name)
    else:
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl, CPUAttentionMetadataBuilder

        clock.watch(CPUAttentionMetadataBuilder, "build", "build")
        clock.watch(CPUAttentionBackendImpl, "forward", "layers")
        clock.watch(CPUAttentionBackendImpl, "do_kv_cache_update", "layers")
    prompts = [{"prompt_token_ids": [i + 1] * PROMPT} for i in range(SEQS)]
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True, detokenize=False)
        llm.llm_engine.add_request(str(number), prompt, sampling)
    while llm.llm_engine.has_unfinished_requests():
        begun = time.perf_counter()
        llm.llm_engine.step()
        clock.now["step"] = time.perf_counter() - begun
        clock.end()
    decodes = clock.steps[2:-1]
    labels = sorted({label for step in decodes for label in step})
    found = {n: 1e6 * statistics.median(step[n] for step in decodes) for n in labels}
    if backend:
        inside = ("prepare", "write", "attend")
        rest = [s["build"] + s["layers"] - sum(s[n] for n in inside) for s in decodes]
        found["bridge"] = 1e6 * statistics.median(rest)
    return found | {"number of layers": len(layers)}


def main(model, *given):
    """Each side in a process of its own: what serves is settled when vLLM loads its plugins."""
    if given:
        print("RESULT", json.dumps(measure(model, given[0])))
        return
    for backend in SIDES:
        command = [sys.executable, __file__, model, backend]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
        found = json.loads(line.removeprefix("RESULT "))
        print(f"{backend or 'vLLM itself':<12}", *(f"{n} {v:,.0f}" for n, v in found.items()))


if __name__ == "__main__":
    main(*sys.argv[1:])
