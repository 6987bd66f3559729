"""`kvcore env`: what a bug report needs. Versions are read from metadata: no library is imported for them."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import kvcore
from kvcore.cli.commands import Command
from kvcore.cli.plugins import plugin_rows
from kvcore.cli.result import Job, Result
from kvcore.config.home import conf_dir
from kvcore.config.schema import DeviceRoot


@dataclass(frozen=True)
class Keys(DeviceRoot):
    """The device that is described, and the options with which backends are asked."""


COMMAND = Command("env", "versions, device, libraries, plugins: what a bug report needs", Keys)
LIBRARIES = (
    "torch",
    "transformers",
    "numpy",
    "safetensors",
    "gguf",
    "pluggy",
    "hydra-core",
    "omegaconf",
    "msgpack",
    "triton",
    "flash-attn",
    "flashinfer-python",
    "prometheus_client",
)
VARIABLES = ("KVCORE_HOME", "KVCORE_DEBUG", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "TRITON_INTERPRET")


def execute(job: Job[Keys]) -> Result:
    """Collect versions, machine, device, libraries and plugins."""
    from kvcore.config.build import device_of

    device = device_of(job.composed)
    document = {
        "kvcore": kvcore.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "device": {
            "kind": device.kind,
            "name": device.name,
            "capability": device.capability,
            "arch": device.arch or None,
            "memory_bytes": device.memory_bytes,
            "present": device.present,
        },
        "libraries": {name: _version(name) for name in LIBRARIES},
        "plugins": plugin_rows(job.registry, job.composed.config.backends),
        "variables": {name: os.environ.get(name) for name in VARIABLES},
        "conf": str(conf_dir()),
    }
    return Result(document, _text(document))


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _text(document: Mapping[str, object]) -> str:
    lines: list[str] = []
    for name, value in document.items():
        if isinstance(value, dict):
            lines += [name, *(f"  {k}: {_shown(v)}" for k, v in value.items())]
        elif isinstance(value, list):
            lines.append(name)
            for row in value:
                lines.append(f"  {row['name']}: {row['state']}, {row['distribution']} {row['version']}")
                lines += [f"    {row['reason']}"] if row["reason"] else []
        else:
            lines.append(f"{name}: {value}")
    return "\n".join(lines)


def _shown(value: object) -> object:
    return "-" if value is None else value
