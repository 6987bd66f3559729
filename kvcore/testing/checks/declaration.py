"""Level 0: what a declaration says of itself. No kernel runs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

from kvcore.attention.declaration import DeviceFacts
from kvcore.attention.query import AttentionQuery, Mask
from kvcore.errors import KVCoreError
from kvcore.registry.declarations import backend_problem, options_problem
from kvcore.spec.cache_spec import KVCacheSpec
from kvcore.spec.content import Content, KVHeads, Latent, Quant
from kvcore.spec.dtypes import DTYPES
from kvcore.spec.layout import LayoutOption
from kvcore.spec.retention import Full
from kvcore.testing.cases.answers import reasoned, well_formed
from kvcore.testing.cases.axes import LATENT
from kvcore.testing.cases.outcome import PROOFS, CheckFailure, Measure, Refused
from kvcore.testing.cases.planning import layouts_of
from kvcore.testing.checks.context import Context
from kvcore.testing.oracle.layout_bytes import field_starts

DEVICES = (
    DeviceFacts("cpu"),
    DeviceFacts("cuda", "sm_75", (7, 5), present=False),
    DeviceFacts("cuda", "sm_80", (8, 0), present=False),
    DeviceFacts("cuda", "sm_90", (9, 0), present=False),
    DeviceFacts("cuda", "sm_100", (10, 0), present=False),
    DeviceFacts("rocm", "gfx942", arch="gfx942", present=False),
)


def check_contract(context: Context) -> Measure:
    """Name, contract version, all methods, offset bits, flags."""
    spec = context.target.spec
    problem = backend_problem(spec)
    if problem:
        raise CheckFailure(problem)
    for flag in ("batch_invariant", "deterministic", "graph_capture", "reads_unwritten_slots"):
        if not isinstance(getattr(spec, flag), bool):
            raise CheckFailure(f"{flag} is {getattr(spec, flag)!r}, not a bool")
    for key, value in spec.priority.items():
        if not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, int):
            raise CheckFailure(f"priority has {key!r}: {value!r}; it maps device kinds to whole numbers")
    return Measure()


def check_options(context: Context) -> Measure:
    """`Config` is a dataclass that can be made without arguments, and the options in use are one."""
    spec = context.target.spec
    problem = options_problem(spec.Config)
    if problem:
        raise CheckFailure(f"Config {problem}")
    made = spec.Config()
    if not is_dataclass(made) or isinstance(made, type) or made != spec.Config():
        raise CheckFailure("two instances of Config with defaults are not equal")
    for changes in spec.conform_options:
        try:
            replace(made, **changes)
        except (KVCoreError, TypeError) as error:
            raise CheckFailure(f"conform_options names {dict(changes)}: {error}") from error
    if not isinstance(context.target.options, spec.Config):
        raise CheckFailure(f"options are {type(context.target.options).__name__}, not {spec.Config.__name__}")
    return Measure()


def check_no_torch(context: Context) -> Measure:
    """The module of the declaration, imported in a fresh process, loads no torch and no kernel library."""
    spec = context.target.spec
    module = sys.modules.get(spec.__module__)
    if spec.__module__ == "__main__" or "<locals>" in spec.__qualname__ or not getattr(module, "__file__", None):
        return Measure()  # made inside a function or a script: there is no module of its own to import
    code = (
        f"import sys; sys.path[:] = {sys.path!r}; "
        f"import importlib; importlib.import_module({spec.__module__!r}); "
        "print(*[m for m in ('torch', 'triton', 'flash_attn', 'flashinfer', 'vllm') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if done.returncode:
        if "ModuleNotFoundError" in done.stderr and spec.__module__ in done.stderr:
            return Measure()  # loaded from a file under a name that no other process can import
        raise CheckFailure(f"importing {spec.__module__} alone fails: {done.stderr.strip().splitlines()[-1]}")
    if done.stdout.strip():
        raise CheckFailure(f"importing {spec.__module__} loads {done.stdout.strip()}; the declaration must not")
    return Measure()


def check_devices(context: Context) -> Measure:
    """Every device gets an answer, present or not, and an unknown kind is refused."""
    spec, options = context.target.spec, context.target.options
    for facts in DEVICES:
        well_formed(spec.unsupported_device(facts, options), f"unsupported_device({facts.name or facts.kind})")
    if spec.unsupported_device(DeviceFacts("abacus", present=False), options) is None:
        raise CheckFailure("a device of unknown kind is accepted; what is not known is unsupported")
    return Measure()


@dataclass(frozen=True)
class _LaterQuery(AttentionQuery):
    """A query of a later contract, with a feature that no backend knows."""

    later_feature: bool = False

    def features(self) -> dict[str, object]:
        found = super().features()
        return found | ({"later_feature": True} if self.later_feature else {})


def check_fails_closed(context: Context) -> Measure:
    """Contents, dtypes, formats and features that nobody knows are refused."""
    spec, options, known = context.target.spec, context.target.options, context.case.query()
    later = _LaterQuery(**{f.name: getattr(known, f.name) for f in fields(known)}, later_feature=True)
    strange = {
        "an unknown content": replace(known, content="hologram"),
        "an unknown dtype": replace(known, dtype="float1", cache_dtype="float1"),
        "an unknown cache dtype": replace(known, cache_dtype="float3"),
        "an unknown scale granularity": replace(known, cache_dtype="int8", quant="galaxy"),
        "an unknown feature": later,
    }
    for what, query in strange.items():
        answer = spec.unsupported(query, options)
        well_formed(answer, f"unsupported for {what}")
        if answer is None:
            raise CheckFailure(f"{what} is accepted; what is not known is unsupported")
    for content in (_Strange(),):
        if list(spec.layouts(KVCacheSpec(content, Full()), context.target.facts, options)):
            raise CheckFailure("layouts are offered for a content that nobody knows")
    return Measure()


class _Strange(Content):
    """A content that no backend knows."""

    kind = "hologram"

    def fields(self) -> tuple[Any, ...]:
        """One field."""
        return KVHeads(1, 8, dtype="float16").fields()[:1]


def check_refusals(context: Context) -> Measure:
    """Every refusal names the field, what was given, and what is allowed; what is missing has a reason."""
    spec, options, known = context.target.spec, context.target.options, context.case.query()
    reasoned(spec.unavailable(options), "unavailable")
    asked = [replace(known, dtype=name, cache_dtype=name) for name in ("float16", "bfloat16", "float32", "float64")]
    asked += [replace(known, head_dim=n, head_dim_v=n) for n in (1, 24, 32, 64, 80, 96, 128, 192, 256, 512)]
    asked += [replace(known, num_heads=known.num_kv_heads * g) for g in (1, 2, 3, 5, 7, 8, 16)]
    asked += [replace(known, mask=m) for m in (Mask(False), Mask(window=7), Mask(chunk=8))]
    asked += [replace(known, softcap=30.0), replace(known, alibi=True), replace(known, sinks=True)]
    asked += [replace(known, scale=0.5), replace(known, lse=True), replace(known, graph_capture=True)]
    for name in ("int8", "int4", "fp8_e4m3", "fp8_e5m2"):
        asked += [replace(known, cache_dtype=name, quant=q) for q in ("tensor", "head", "token_head")]
    for query in asked:
        well_formed(spec.unsupported(query, options), f"unsupported for {query}")
    return Measure()


def check_layouts(context: Context) -> Measure:
    """Every layout holds the content, with names of its own and kernel block sizes that can be cut."""
    for content, options in _offered(context):
        names = [o.layout.name for o in options]
        if len(set(names)) < len(names):
            raise CheckFailure(f"two layouts for {content} are both called {max(names, key=names.count)}")
        for option in options:
            if not isinstance(option, LayoutOption):
                raise CheckFailure(f"layouts returned {option!r}, not a LayoutOption")
            try:
                option.layout.check(content)
            except KVCoreError as error:
                raise CheckFailure(f"layout {option.layout.name} for {content}: {error}") from error
            if not _sizes(option):
                raise CheckFailure(f"layout {option.layout.name}: no kernel block size up to 4096 is taken")
    return Measure()


def check_page_bytes(context: Context) -> Measure:
    """Bytes of a page agree with its fields, fields do not overlap, and the alignment is kept."""
    for content, options in _offered(context):
        for option in options:
            layout = option.layout
            for size in _sizes(option):
                try:
                    sized = layout.at(size)
                except KVCoreError as error:
                    raise CheckFailure(f"layout {layout.name} declares blocks of {size}, but: {error}") from error
                if sized.payload_bytes != content.bytes_per_token * size:
                    raise CheckFailure(
                        f"layout {layout.name} at {size} tokens: fields take {sized.payload_bytes} bytes, "
                        f"the content needs {content.bytes_per_token * size}"
                    )
                starts, page = field_starts(layout.fields, size, layout.alignment)
                if layout.order == "block_first" and (
                    [p.offset for p in sized.places] != starts or sized.kernel_page_bytes != page
                ):
                    raise CheckFailure(f"layout {layout.name}: offsets are not where its fields end")
                if sized.kernel_page_bytes % layout.alignment:
                    raise CheckFailure(f"layout {layout.name} does not keep its alignment of {layout.alignment}")
    return Measure()


def check_stand_ins(context: Context) -> Measure:
    """Every stand-in is a boolean option, off by default, and leads to a level of proof that exists."""
    spec = context.target.spec
    for option, proof in spec.stand_ins.items():
        if getattr(spec.Config(), option, None) is not False:
            raise CheckFailure(f"stand-in {option} is no option of Config that is False by default")
        if proof not in PROOFS[1:]:
            raise CheckFailure(f"stand-in {option} leads to {proof!r}; allowed: {', '.join(PROOFS[1:])}")
        switched_on = replace(spec.Config(), **{option: True})
        reasoned(spec.unavailable(switched_on), f"unavailable with {option}")
        if spec.proof(switched_on, context.target.facts) != proof:
            raise CheckFailure(f"proof() does not say {proof} with {option} switched on")
    found = spec.proof(context.target.options, context.target.facts)
    if found not in PROOFS:
        raise CheckFailure(f"proof() says {found!r}; allowed: {', '.join(PROOFS)}")
    return Measure()


def check_stable(context: Context) -> Measure:
    """Asked twice, a declaration answers the same."""
    spec, options, facts = context.target.spec, context.target.options, context.target.facts
    query, cache = context.case.query(), context.case.cache_spec()
    for what, ask in (
        ("unavailable", lambda: spec.unavailable(options)),
        ("unsupported_device", lambda: spec.unsupported_device(facts, options)),
        ("unsupported", lambda: spec.unsupported(query, options)),
        ("layouts", lambda: [o.layout for o in spec.layouts(cache, facts, options)]),
    ):
        if ask() != ask():
            raise CheckFailure(f"{what} answers the same question in two ways")
    return Measure()


def check_core_profile(context: Context) -> Measure:
    """At least one core profile is taken; whether it is held, the profile's own cases say."""
    spec, options, case = context.target.spec, context.target.options, context.case
    profiles = {
        "causal attention over KV heads": [case],
        "bidirectional attention": [replace(case, causal=False)],
        "absorbed latents": [replace(case, dtype=name, **LATENT) for name in DTYPES if "float" in name],
    }
    refusals = []
    for name, cases in profiles.items():
        for one in cases:
            refused: object = spec.unsupported(one.query(), options)
            try:
                if refused is None and layouts_of(one.cache_spec(), context.target):
                    return Measure()
            except Refused as by_name:
                refused = by_name
        refusals.append(f"{name}: {refused or 'no layout'}")
    raise CheckFailure("no core profile is taken: " + "; ".join(refusals))


def _offered(context: Context) -> Iterator[tuple[Content, list[LayoutOption]]]:
    """The layouts of many contents, as far as the backend offers any."""
    dtype = context.case.dtype
    contents: list[Content] = [
        KVHeads(heads, dim, dim_v, name)
        for name in dict.fromkeys((dtype, "float16", "bfloat16", "float32"))
        for heads in (1, 2, 5)
        for dim, dim_v in ((32, 32), (64, 64), (80, 80), (128, 128), (256, 256), (192, 128), (64, 32))
    ]
    for name in (d for d in DTYPES if DTYPES[d].quantized):
        contents += [KVHeads(2, 64, None, name, Quant(g)) for g in ("tensor", "head", "token_head")]
    contents.append(Latent(512, 64, "bfloat16"))
    own = context.case.stored_as
    if own is not None:
        contents = [c for c in map(own.instead_of, contents) if c is not None]
    for content in contents:
        try:
            found = layouts_of(KVCacheSpec(content, Full()), context.target)
        except Refused:
            continue  # a refusal by name is an answer
        if found:
            yield content, found


def _sizes(option: LayoutOption) -> list[int]:
    sizes = [1, 2, 4, 8, 16, 24, 32, 64, 128, 256, 512, 1024, 4096]
    sizes += list(option.kernel_blocks.sizes)
    return sorted({n for n in sizes if option.kernel_blocks.fit(n) == n})
