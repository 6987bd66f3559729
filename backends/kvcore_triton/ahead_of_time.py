"""Compiles variants ahead of time, with no device: registers, spills and shared memory of each."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from kvcore_triton.targets import TARGETS
from kvcore_triton.variants import Variant


class Resources(NamedTuple):
    """What a compiled variant takes.

    Attributes:
        registers: Registers of a thread.
        spilled_bytes: Bytes of local memory that a thread spills.
        shared_bytes: Shared memory of a program.
        warps: Warps of a program.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int


def compiled(variant: Variant, **constants: int) -> Resources:
    """Compile one variant.

    Args:
        variant: The variant.
        constants: Compile-time constants, ``num_warps`` and ``num_stages`` to use instead of the table's.
    """
    from kvcore_triton.kernels.attention import attend_tiles, merge_splits
    from kvcore_triton.kernels.write import write_step

    kernel: Any = {"attend": attend_tiles, "merge": merge_splits, "write": write_step}[variant.kernel]
    types, values = variant.signature()
    own = {name: constants.pop(name) for name in ("num_warps", "num_stages") if name in constants}
    return resources(kernel, types, values | constants, variant.target, variant.options() | own)


def resources(
    kernel: Any, types: dict[str, str], values: dict[str, Any], target: str, options: dict[str, int]
) -> Resources:
    """Compile a kernel, and look at what it takes.

    Args:
        kernel: A function under `triton.jit`.
        types: Triton's name of the type of each argument.
        values: Each compile-time constant.
        target: Name of the target.
        options: How it is compiled.
    """
    import triton
    from triton.compiler import ASTSource

    names: list[str] = list(kernel.arg_names)
    signature = {name: types.get(name, "constexpr") for name in names}
    # As a launch has it: tensors start at 16 bytes, and of what is not specialised nothing is known.
    loose = {p.name for p in kernel.params if p.do_not_specialize}
    aligned = [n for n, t in signature.items() if t.startswith("*") and n not in loose]
    source = ASTSource(
        fn=kernel,
        signature=signature,
        constexprs={(names.index(name),): value for name, value in values.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    made = triton.compile(source, target=gpu_target(target), options=options)
    shared, warps = int(made.metadata.shared), int(made.metadata.num_warps)
    if target.startswith("sm_"):
        registers, spilled = _of_cubin(made, target)
    else:
        registers, spilled = _of_amdgcn(str(made.asm["amdgcn"]))
    return Resources(registers, spilled, shared, warps)


def gpu_target(name: str) -> Any:
    """Triton's name of a target."""
    from triton.backends.compiler import GPUTarget

    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name[3:]), 32)
    return GPUTarget("hip", name, TARGETS[name].warp)


def _of_cubin(made: Any, target: str) -> tuple[int, int]:
    """Registers and spilled bytes, from the binary; only where it has a stack is the assembler asked why."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(made.asm["cubin"])
        file.flush()
        shown = _tool("cuobjdump", "-res-usage", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", shown)
    if found is None:
        raise RuntimeError(f"cuobjdump shows no resource usage: {shown!r}")
    return int(found[1]), _spills(str(made.asm["ptx"]), target) if int(found[2]) else 0


def _spills(ptx: str, target: str) -> int:
    """Bytes of spill stores and loads."""
    new = int(target[3:]) >= 100
    arch = target if target == "sm_80" else f"{target}a"
    with tempfile.NamedTemporaryFile(suffix=".ptx", mode="w") as file:
        file.write(ptx)
        file.flush()
        assembler = "ptxas-blackwell" if new else "ptxas"
        # With the options that Triton itself gives it.
        options = ("-v", "--regAllocOptLevel=2", f"--gpu-name={arch}")
        shown = _tool(assembler, *options, file.name, "-o", "/dev/null")
    return sum(int(n) for n in re.findall(r"(\d+) bytes spill (?:stores|loads)", shown))


def _tool(name: str, *arguments: str) -> str:
    """What one of the tools that Triton brings along says."""
    path = Path(_triton_folder()) / "backends" / "nvidia" / "bin" / name
    done = subprocess.run([str(path), *arguments], capture_output=True, text=True, check=True)
    return done.stdout + done.stderr


def _of_amdgcn(text: str) -> tuple[int, int]:
    counts = {name: int(n) for name, n in re.findall(r"\.(vgpr_count|vgpr_spill_count):\s+(\d+)", text)}
    return counts["vgpr_count"], 4 * counts["vgpr_spill_count"]


def _triton_folder() -> str:
    import triton

    return str(Path(triton.__file__).parent)
