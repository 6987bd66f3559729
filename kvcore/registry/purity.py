"""Does a plugin's declaration import torch or a kernel library? It must not: listing and planning load it.

Two checks, because `import torch` leaves a trace only once a process:

1. While none of the libraries is loaded, one that appears in `sys.modules` during the load was
   pulled in by it.
2. Where one is loaded already, the top-level imports of the plugin's own package, and of what it imports
   from kvcore, are read from their source, without running anything.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from importlib.util import find_spec, resolve_name
from pathlib import Path

import kvcore

HEAVY = ("torch", "triton", "flashinfer", "flash_attn", "vllm", "transformers")


def loaded_heavy() -> set[str]:
    """The forbidden libraries that this process has loaded."""
    return {name for name in HEAVY if name in sys.modules}


def static_heavy(modules: Iterable[str], also: Iterable[str] = ()) -> str | None:
    """A sentence naming the first forbidden top-level import reachable from `modules`, or None.

    Follows modules of the same top-level packages and of kvcore; imports inside functions and under
    ``if TYPE_CHECKING`` do not count.

    Args:
        modules: The plugin's module, and those of the classes that it declared.
        also: Modules that its loading imported; those of other packages are not looked at.
    """
    own = {m.partition(".")[0] for m in modules} | {"kvcore"}
    seen: set[str] = set()
    todo = [*modules, *also]
    while todo:
        name = todo.pop()
        if name in seen or name.partition(".")[0] not in own:
            continue
        seen.add(name)
        parents = name.split(".")[:-1]
        todo += [".".join(parents[: i + 1]) for i in range(len(parents))]
        path = _source_of(name)
        if path is None:
            continue
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        for imported in _top_level_imports(path, package):
            if imported.partition(".")[0] in HEAVY:
                return f"module {name} imports {imported.partition('.')[0]} when it is loaded"
            todo.append(_home(imported))
    return None


def _home(name: str) -> str:
    """The module behind a name that is loaded on first use (``kvcore.backend.AttentionBackend`` loads torch)."""
    package, _, attribute = name.rpartition(".")
    if package == "kvcore.backend":
        return str(import_module(package).MODULE_OF.get(attribute, name))
    return kvcore._HOMES.get(attribute, name) if package == "kvcore" else name


def _source_of(name: str) -> Path | None:
    loaded = sys.modules.get(name)
    try:
        spec = loaded.__spec__ if loaded is not None else find_spec(name)
    except (ImportError, AttributeError, ValueError):
        return None  # a name imported *from* a module, not a module itself
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    path = Path(spec.origin)
    return path if path.is_file() else None


def _top_level_imports(path: Path, package: str) -> Iterator[str]:
    todo: list[ast.stmt] = list(ast.parse(path.read_bytes()).body)
    while todo:
        node = todo.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = resolve_name("." * node.level + base, package)
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            todo += node.orelse
        elif isinstance(node, ast.If | ast.With | ast.ClassDef | ast.For | ast.While):
            todo += node.body + getattr(node, "orelse", [])
        elif isinstance(node, ast.Try):
            todo += node.body + node.orelse + node.finalbody
            for handler in node.handlers:
                todo += handler.body
