"""Kernels with one fault planted in their source, put into the backend for the length of a test."""

import importlib.util
from contextlib import contextmanager
from pathlib import Path

import kvcore_triton.backend as backend
from kvcore_triton.kernels import attention, write

KERNELS = {attention: ("attend_tiles", "merge_splits"), write: ("write_step",)}


@contextmanager
def fault(module, old, new, folder: Path):
    """The backend with `old` replaced by `new` in a kernel's source, once and exactly."""
    source = Path(module.__file__).read_text()
    assert source.count(old) >= 1, f"the source has no {old!r} any more"
    path = folder / "faulty.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"faulty_{abs(hash((old, new)))}", path)
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    kept = {name: getattr(backend, name) for name in KERNELS[module]}
    for name in kept:
        setattr(backend, name, getattr(made, name))
    try:
        yield
    finally:
        for name, kernel in kept.items():
            setattr(backend, name, kernel)
