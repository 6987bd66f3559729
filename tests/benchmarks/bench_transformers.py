"""A decode step of transformers on kvcore's cache, beside its own attention and beside the step of our engine; medians.

python tests/benchmarks/bench_transformers.py [--sequences N] [--context N] [--rounds N]

The default model in float32, CPU time of the thread. "Before the model" is what comes once a step: hooks of the bridge;
scheduling, tables, batch and sampling of our engine. "A layer" is what is done around the backend, layer by layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

import torch

Clock = dict[str, float]


def timed(owner: Any, name: str, clock: Clock, key: str) -> None:
    """Count the time of a method under `key`."""
    inner = getattr(owner, name)

    def outer(*args: Any, **kwargs: Any) -> Any:
        begun = time.thread_time()
        try:
            return inner(*args, **kwargs)
        finally:
            clock[key] += time.thread_time() - begun

    setattr(owner, name, outer)


def time_backend(attention: Any, clock: Clock) -> None:
    """Count what the backend does for all layers."""
    for name in ("write", "attend"):
        timed(attention, name, clock, "backend")


class Transformers:
    """`model(...)` with one token a sequence, on a cache of transformers or on ours."""

    def __init__(self, model: Any, prompts: torch.Tensor, cache: Any) -> None:
        self.model, self.cache, self.clock = model, cache, defaultdict[str, float](float)
        self.ids = self.forward(prompts)

    @torch.inference_mode()
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The next token of each sequence."""
        logits = self.model(input_ids=ids, cache=self.cache, logits_to_keep=1).logits
        return logits[:, -1].argmax(-1, keepdim=True)

    def step(self) -> None:
        """One decode."""
        self.ids = self.forward(self.ids)


def bridge(model: Any, prompts: torch.Tensor) -> Transformers:
    """On our cache, with the clock in the bridge and in the backend."""
    from kvcore_transformers import PagedCache
    from kvcore_transformers.forward import ForwardPass

    size, context = prompts.shape
    engine = {"max_model_len": 2 * context, "max_num_batched_tokens": prompts.numel(), "max_num_seqs": size}
    cache = PagedCache.for_model(model, backend="torch", cache={"num_blocks": size * context // 4}, engine=engine)
    made = Transformers(model, prompts, cache)
    for name in ("begin", "end"):
        timed(cache, name, made.clock, "step")
    timed(ForwardPass, "attend", made.clock, "layers")
    time_backend(cache.paged.attention, made.clock)
    return made


class Ours:
    """Our engine with the same prompts."""

    def __init__(self, path: Any, prompts: torch.Tensor) -> None:
        import kvcore
        from kvcore.engine.settings import SamplingParams
        from kvcore.models.transformers_bridge import ForwardCall

        size, context = prompts.shape
        keys = [f"model.path={path}", "model.dtype=float32", "device=cpu", "backend=torch"]
        keys += [f"cache.num_blocks={size * context // 4}", f"engine.max_model_len={2 * context}"]
        self.llm = kvcore.LLM(*keys, f"engine.max_num_batched_tokens={prompts.numel()}")
        self.clock = defaultdict[str, float](float)
        sampling = SamplingParams(max_tokens=context - 1, ignore_eos=True)
        for i, prompt in enumerate(prompts.tolist()):
            self.llm.core.add_request(str(i), prompt, sampling)
        self.step()
        worker = self.llm.core.executor.worker
        timed(worker.model, "forward", self.clock, "model")
        timed(ForwardCall, "attend", self.clock, "layers")
        time_backend(worker.runner.cache.attention, self.clock)

    def step(self) -> None:
        """One decode."""
        self.llm.core.step()


def main() -> None:
    """Interleave steps of the three, and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=30)
    asked = parser.parse_args()
    from transformers import AutoModelForCausalLM, DynamicCache

    from kvcore.models.home import ensure_model

    torch.set_num_threads(1)
    path = ensure_model()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True).eval()
    prompts = torch.randint(1, 40_000, (asked.sequences, asked.context), generator=torch.Generator().manual_seed(0))
    runs: dict[str, Any] = {
        "transformers, sdpa": Transformers(model, prompts, DynamicCache(config=model.config)),
        "transformers, kvcore's torch": bridge(model, prompts),
        "kvcore run, torch": Ours(path, prompts),
    }
    taken = {name: ([], [], []) for name in runs}
    for _ in range(asked.rounds):
        for name, run in runs.items():
            run.clock.clear()
            begun = time.thread_time()
            run.step()
            step, clock = time.thread_time() - begun, run.clock
            once = step - clock["model"] if "model" in clock else clock["step"]
            each = (clock["layers"] - clock["backend"]) / model.config.num_hidden_layers
            for numbers, number in zip(taken[name], (step, once, each), strict=True):
                numbers.append(number)
    print(f"{asked.sequences} sequences, {asked.context} tokens in the cache, {asked.rounds} rounds; CPU of a decode")
    (plain, _, _), *_ = taken.values()
    for name, numbers in taken.items():
        step, once, each = (statistics.median(n) for n in numbers)
        ratio = statistics.median(a / b for a, b in zip(numbers[0], plain, strict=True))
        print(
            f"{name:30} {step * 1e3:8.1f} ms ({ratio:.2f}), before the model {once * 1e3:6.2f} ms, "
            f"a layer {each * 1e6:5.0f} us"
        )


if __name__ == "__main__":
    main()
