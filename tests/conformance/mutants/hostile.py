"""Hostile backends: each does one thing to the kit that a backend must not do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvcore.attention.declaration import BackendSpec

from .mutant import Mutant, load


@dataclass(frozen=True)
class Hostile:
    """A hostile backend.

    Attributes:
        change: The line that makes it so.
        outcome: How every case with sinks ends.
        words: What some reason says.
    """

    change: Mutant
    outcome: str
    words: str

    @property
    def name(self) -> str:
        """Its name."""
        return self.change.name

    def spec(self, folder: Path) -> type[BackendSpec]:
        """Its declaration, under a name of its own."""
        changed = {self.change.file: self.change.source()}
        declared = changed.get("spec.py") or (folder / "mutant_of_nothing" / "spec.py").read_text()
        changed["spec.py"] = declared.replace('name = "reference"', f'name = "{self.name}"')
        return load(f"hostile_{self.name}", changed, folder)


def _hostile(name: str, broken: str, file: str, old: str, new: str, outcome: str, words: str) -> Hostile:
    return Hostile(Mutant(name, "any", broken, file, old, new, cases=()), outcome, words)


_RESULT = "out[step.rows] = result.to(out.dtype)"
_READ = "for step in metadata.sequences:"
HOSTILE = (
    _hostile(
        "lies",
        "declares sinks, and its kernel has none",
        "softmax.py",
        "total_Ht1 = total_Ht1 + torch.exp(sinks_H11 - peak_Ht1)",
        "pass",
        "failed",
        "accepted and ignored",
    ),
    _hostile(
        "no_library",
        "its library is not here",
        "spec.py",
        "return None  # needs torch alone",
        'return "libkernel is missing; pip install libkernel"',
        "skipped",
        "pip install libkernel",
    ),
    _hostile(
        "no_device",
        "its device is not here",
        "spec.py",
        'if facts.kind in ("cpu", "cuda"):',
        'if facts.kind == "npu":',
        "skipped",
        "device=cpu",
    ),
    _hostile(
        "raises",
        "raises inside a kernel",
        "softmax.py",
        "facts = layer.query",
        'raise RuntimeError("illegal memory access")',
        "failed",
        "illegal memory access",
    ),
    _hostile(
        "exits",
        "calls sys.exit inside a kernel",
        "softmax.py",
        "facts = layer.query",
        'raise SystemExit("kernel says good-bye")',
        "failed",
        "SystemExit",
    ),
    _hostile(
        "out_of_memory",
        "runs out of memory",
        "softmax.py",
        "facts = layer.query",
        'raise torch.OutOfMemoryError("tried to allocate 1 PiB")',
        "failed",
        "OutOfMemoryError",
    ),
    _hostile(
        "recurses",
        "recurses without end",
        "softmax.py",
        "facts = layer.query",
        "return attend_dense(layer, q_tHD, keys_nKD, values_nKV, step)",
        "failed",
        "RecursionError",
    ),
    _hostile(
        "wrong_shape",
        "gives an answer of another shape",
        "backend.py",
        _RESULT,
        "out.resize_(3, 1, 1)",
        "failed",
        "attend changed shape or dtype of `out`",
    ),
    _hostile(
        "wrong_dtype",
        "gives an answer of another dtype",
        "backend.py",
        _RESULT,
        "out.data = result.to(torch.float16)",
        "failed",
        "",
    ),
    _hostile(
        "returns",
        "returns its answer where it should write it",
        "backend.py",
        _READ,
        'return query["q"].clone()\n' + _READ,
        "failed",
        "its result belongs into `out`",
    ),
    _hostile(
        "spills",
        "writes around its answer",
        "backend.py",
        _RESULT,
        _RESULT + "\nout.as_strided((1,), (1,), out.storage_offset() - 1).fill_(0)",
        "failed",
        "attend wrote outside `out`",
    ),
    _hostile(
        "scribbles",
        "changes the cache while it reads",
        "backend.py",
        _RESULT,
        _RESULT + '\ncache["v"][-1] = 1',
        "failed",
        "attend changed the cache",
    ),
    _hostile(
        "null_block",
        "writes to the null block",
        "store.py",
        "view_NP[block, offset] = values",
        "view_NP[block, offset] = values\nview_NP[0] = 1",
        "failed",
        "the null block",
    ),
    _hostile(
        "changes_queries",
        "changes the queries",
        "backend.py",
        'q_tHD = query["q"][step.rows]',
        'q_tHD = query["q"][step.rows].mul_(2)',
        "failed",
        "attend changed the queries",
    ),
    _hostile(
        "version_2",
        "speaks version 2 of the contract",
        "spec.py",
        "api_version = 1",
        "api_version = 2",
        "failed",
        "version 2, this core speaks 1",
    ),
    _hostile(
        "no_backend",
        "its factory gives nothing",
        "spec.py",
        "return ReferenceBackend(device)",
        "return ReferenceBackend",
        "failed",
        "",
    ),
    _hostile(
        "exits_when_asked",
        "calls sys.exit when it is asked for a layer",
        "spec.py",
        "wanted = GRANULARITY.get(query.cache_dtype)",
        'raise SystemExit("ask somebody else")',
        "failed",
        "SystemExit: ask somebody else",
    ),
    _hostile(
        "exits_for_layouts",
        "calls sys.exit when it is asked for layouts",
        "spec.py",
        "content = spec.content",
        'raise SystemExit("no layouts today")',
        "failed",
        "SystemExit: no layouts today",
    ),
    _hostile(
        "exits_for_its_library",
        "calls sys.exit when it looks for its library",
        "spec.py",
        "return None  # needs torch alone",
        'raise SystemExit("no library")',
        "failed",
        "SystemExit: no library",
    ),
    _hostile(
        "gold",
        "claims a level of proof that there is none of",
        "spec.py",
        "api_version = 1",
        'api_version = 1\n\n@classmethod\ndef proof(cls, options, facts):\n    return "gold"\n',
        "failed",
        "proof() says 'gold'; allowed: device, interpreter, host, emulated",
    ),
    _hostile(
        "missing_without_reason",
        "its library is missing, and it does not say which",
        "spec.py",
        "return None  # needs torch alone",
        'return ""',
        "failed",
        "unavailable answered ''",
    ),
    _hostile(
        "missing_as_a_flag",
        "says yes to the question why its library is missing",
        "spec.py",
        "return None  # needs torch alone",
        "return True",
        "failed",
        "unavailable answered True, not None or a reason",
    ),
    _hostile(
        "no_device_as_a_flag",
        "says yes to the question why it does not serve a device",
        "spec.py",
        'if facts.kind in ("cpu", "cuda"):',
        'if facts.kind == "cpu":\n    return True\nif facts.kind:',
        "failed",
        "answered True, not None or Refusal",
    ),
    _hostile(
        "declaration_raises",
        "its declaration raises",
        "spec.py",
        "wanted = GRANULARITY.get(query.cache_dtype)",
        'wanted = GRANULARITY["no such dtype"]',
        "failed",
        "KeyError",
    ),
)
