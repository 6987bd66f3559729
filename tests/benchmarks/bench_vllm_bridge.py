"""What a decode step of vLLM costs on its own attention, and on the same kernels through `kvcore_vllm`.

Run in an environment with vLLM (`make test-engines` makes `.venv-vllm`), from the root of the checkout:

    PYTHONPATH=.:backends:plugins .venv-vllm/bin/python tests/benchmarks/bench_vllm_bridge.py MODEL [--rounds N]

CPU time of one step, in its one thread: building its metadata, and all layers' writes and attention. Through the bridge
the backend's own calls are timed apart, so that what is left is the bridge. Medians over the decode steps of a process,
then over the rounds, in which the sides take turns.
"""

from __future__ import annotations

import argparse
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
            begun = time.thread_time()
            result = method(*arguments, **more)
            self.now[label] += time.thread_time() - begun
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
    import torch
    from vllm import LLM, SamplingParams

    limits = {"max_model_len": 512, "max_num_seqs": SEQS, "max_num_batched_tokens": SEQS * PROMPT}
    llm = LLM(model, skip_tokenizer_init=True, dtype="float32", enforce_eager=True, **limits)
    if torch.get_num_threads() != 1:
        raise RuntimeError("CPU time of one thread says nothing of a step of several: set OMP_NUM_THREADS=1")
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
        begun = time.thread_time()
        llm.llm_engine.step()
        clock.now["step"] = time.thread_time() - begun
        clock.end()
    decodes = clock.steps[2:-1]
    labels = sorted({label for step in decodes for label in step})
    found = {n: 1e6 * statistics.median(step[n] for step in decodes) for n in labels}
    if backend:
        inside = ("prepare", "write", "attend")
        rest = [s["build"] + s["layers"] - sum(s[n] for n in inside) for s in decodes]
        found["bridge"] = 1e6 * statistics.median(rest)
    return found | {"number of layers": len(layers)}


def main():
    """Each side in a process of its own: what serves is settled when vLLM loads its plugins."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--side", choices=SIDES, help="what a process of this script is asked by it")
    asked = parser.parse_args()
    if asked.side is not None:
        print("RESULT", json.dumps(measure(asked.model, asked.side)))
        return
    rounds = [{side: run(asked.model, side) for side in SIDES} for _ in range(asked.rounds)]
    print(f"{asked.rounds} rounds, load {os.getloadavg()[0]:.1f}; microseconds of CPU a decode step")
    for side in SIDES:
        found = {label: statistics.median(r[side][label] for r in rounds) for label in rounds[0][side]}
        own = statistics.median(r[side]["step"] / r[""]["step"] for r in rounds)
        shown = (f"{label} {value:,.0f}" for label, value in found.items())
        print(f"{side or 'vLLM itself':<12}", *shown, f"step beside vLLM's {own:.2f}")


def run(model, side):
    """`measure` in a new process of one thread."""
    command = [sys.executable, __file__, model, "--side", side]
    one = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    done = subprocess.run(command, env=os.environ | one, stdout=subprocess.PIPE, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


if __name__ == "__main__":
    main()
