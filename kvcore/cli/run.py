"""`kvcore run`: prompts in, texts out, on the paged cache, with what it took to get there."""

# ruff: noqa: RUF009  (`key` makes a dataclass field)
from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvcore.cli.commands import Command
from kvcore.cli.result import DONE, NO, Job, Result
from kvcore.config.schema import EngineRoot
from kvcore.settings.key import key

if TYPE_CHECKING:
    from kvcore.config.build import Built
    from kvcore.engine.settings import EngineSettings
    from kvcore.registry.registry import Registry
    from kvcore.worker.messages import Logprobs


@dataclass(frozen=True)
class Keys(EngineRoot):
    """An engine, and its prompts."""

    prompts: str | None = key(None, "UTF-8 file of prompts, one a line, empty lines skipped")
    salts: list[str] | None = key(None, "a salt for each prompt: only prompts of equal salt share prefixes")


COMMAND = Command(
    "run",
    "answer prompts with a model on the paged cache",
    Keys,
    usage="[--prompt TEXT ...] [KEY=VALUE ...] [-m]",
    prompts=True,
)


def execute(job: Job[Keys]) -> Result:
    """Generate."""
    from kvcore.cli.progress import Display
    from kvcore.cli.prompts import gather
    from kvcore.config.build import build

    prompts = gather(job.prompts, job.composed.config.prompts)
    started = time.perf_counter()
    with Display() as display:
        built = build(job.composed, job.registry, purpose="run", progress=display.fraction)
        display.stage("importing torch and transformers")
        from kvcore.engine.llm import LLM  # late: loads torch
        from kvcore.models.tokenizer import Tokenizer

        job.registry.configure(job.composed.config.plugins)
        # Before the weights: a folder without a tokenizer is told at once.
        tokenizer = Tokenizer.load(built.settings.model_path) if built.settings.model_path else None
        llm = LLM(built.settings, job.registry, display.stage, tokenizer)
        ready = time.perf_counter()
        asked = job.composed.config
        outputs = llm.generate(prompts, asked.sampling, chat=built.chat, salts=asked.salts, on_progress=display.samples)
    plan = llm.plan.as_dict()
    stats = {**llm.stats(), "startup_seconds": ready - started}
    document = {
        "model": built.model,
        "device": built.settings.device.kind,
        "outputs": [
            {
                "prompt": o.prompt,
                "text": o.text,
                "token_ids": list(o.token_ids),
                "finish_reason": o.finish_reason,
                "num_cached_tokens": o.num_cached_tokens,
                "stop_reason": o.stop_reason,
                "logprobs": [_logprobs(told) for told in o.logprobs] or None,
                "explain": None if o.explanation is None else o.explanation.as_dict(),
                "error": None if o.error is None else o.error.as_dict()["error"],
            }
            for o in outputs
        ],
        "plan": plan,
        "stats": stats,
        "backends": llm.backends,
        "proof": _proofs(llm.backends, built.settings, job.registry),
        "passed_over": llm.core.selection.passed_over,
        "notes": [*built.notes, *llm.core.selection.notes],
    }
    failed = any(o.error is not None for o in outputs)
    return Result(document, _text(built, document), NO if failed else DONE)


def _logprobs(told: Logprobs) -> dict[str, Any]:
    (token, logprob), *likeliest = told
    top = [{"token_id": i, "logprob": value} for i, value in likeliest]
    return {"token_id": token, "logprob": logprob, "top_logprobs": top}


def _proofs(backends: Mapping[str, str | None], settings: EngineSettings, registry: Registry) -> dict[str, str | None]:
    """By group, what its backend runs on: device, or the stand-in that takes its place."""
    found: dict[str, str | None] = {}
    for group, name in backends.items():
        spec = None if name is None else registry.backends[name]
        options = None if name is None else settings.backend.options.get(name)
        found[group] = None if spec is None else spec.proof(options or spec.Config(), settings.device)
    return found


def _text(built: Built, document: dict[str, Any]) -> str:
    from kvcore.plan.explain import size

    plan, stats, facts = document["plan"], document["stats"], built.settings.facts
    lines = []
    for i, output in enumerate(document["outputs"], 1):
        cached = f", {output['num_cached_tokens']} prompt tokens from the prefix cache"
        lines += [
            f"[{i}] {_short(output['prompt'])}",
            *(f"    {line}" for line in output["text"].strip().splitlines()),
            f"    ({len(output['token_ids'])} tokens, {output['finish_reason']}"
            f"{cached if output['num_cached_tokens'] else ''})",
            *_reuse(output["explain"]),
            *([f"    {output['error']['type']}: {output['error']['message']}"] if output["error"] else []),
            "",
        ]
    rate, total = stats["prefix_hit_rate"], stats["total_blocks"]
    unit = "large pages " if plan["placement"] == "packed" else ""
    share = stats["peak_blocks"] / total if total else 0.0
    lines += [
        f"model     {built.model}, {facts.num_layers} layers, {facts.dtype}, on {document['device']}",
        f"cache     {size(plan['total_bytes'])}, placement {plan['placement']}: {_units(plan)}, "
        f"{plan['bytes_per_token']} bytes a token; room for {plan['tokens']} tokens",
    ]
    for group, proof in zip(plan["groups"], document["proof"].values(), strict=True):
        backend = str(group["backend"])
        if proof not in (None, "device"):
            backend += f" ({proof}: a stand-in, not the device's kernels)"
        lines.append(
            f"  group   {group['kind']}, {len(group['layers'])} layers: backend {backend}, "
            f"layout {group['layout']}, blocks of {group['block_size']} tokens"
        )
    lines += [
        f"blocks    {stats['peak_blocks']} of {total} {unit}in use at the peak ({share:.1%}); "
        f"{stats['copied_blocks']} copied on write; {stats['preemptions']} preemptions",
        f"prefixes  {rate:.1%} of the prompt tokens came from the prefix cache",
        f"speed     {stats['prompt_tokens']} prompt and {stats['output_tokens']} output tokens "
        f"in {stats['seconds']:.2f} s: {stats['tokens_per_second']:.1f} output tokens a second "
        f"(start-up {stats['startup_seconds']:.1f} s)",
    ]
    lines += [f"note      {note}" for note in document["notes"]]
    return "\n".join(lines)


def _reuse(told: dict[str, Any] | None) -> list[str]:
    """Where the reuse of a prompt ended and why, a line a reason."""
    if told is None:
        return []
    reasons = [f"{m['tokens']} from token {m['start']} on: {m['reason']}, {m['text']}" for m in told["missed"]]
    reused = f"    reused {told['hit_tokens']} of {told['prompt_tokens']} prompt tokens"
    return [reused, *(f"      {reason}" for reason in reasons)]


def _units(plan: dict[str, Any]) -> str:
    from kvcore.plan.explain import size

    if plan["num_blocks"] is None:
        return f"{plan['num_large_pages']} large pages of {size(plan['large_page_bytes'])}"
    return f"{plan['num_blocks']} blocks of {size(plan['bytes_per_block'])}"


def _short(prompt: str, width: int = 100) -> str:
    """One line of a prompt: its beginning and its end, where texts that begin alike differ."""
    line = " ".join(prompt.split())
    if len(line) <= width:
        return line
    half = (width - 5) // 2
    return f"{line[:half]} ... {line[-half:]}"
