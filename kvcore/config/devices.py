"""`DeviceFacts` of a configuration. torch is asked only where `auto` or `cuda` makes it necessary."""

from __future__ import annotations

import platform

import psutil

from kvcore.attention.spec import DeviceFacts
from kvcore.config.schema import DeviceKeys
from kvcore.errors import ConfigError


def device_facts(keys: DeviceKeys) -> DeviceFacts:
    """The device that a configuration names.

    Raises:
        ConfigError: `cuda` is asked for and this machine has none, or the facts are malformed.
    """
    if keys.preset == "auto":
        return _cuda() or _cpu()
    if keys.preset == "cpu":
        return _cpu()
    if keys.preset == "cuda":
        found = _cuda()
        if found is None:
            raise ConfigError(
                "this machine has no CUDA device that torch can use",
                field="device", got="cuda", allowed="cpu, or a preset of conf/device for planning",
                remedy="use device=cpu, or install a CUDA build of torch and its driver",
            )  # fmt: skip
        return found
    if keys.capability is not None and len(keys.capability) != 2:
        raise ConfigError(
            "a compute capability is two numbers",
            field="device.capability", got=keys.capability, allowed="[major, minor]",
        )  # fmt: skip
    return DeviceFacts(
        kind=keys.kind,
        name=keys.name,
        capability=(keys.capability[0], keys.capability[1]) if keys.capability else None,
        arch=keys.arch,
        memory_bytes=keys.memory_bytes or 0,
        present=False,
    )


def _cpu() -> DeviceFacts:
    memory = psutil.virtual_memory()
    return DeviceFacts("cpu", platform.processor() or platform.machine(), memory_bytes=int(memory.total))


def _cuda() -> DeviceFacts | None:
    import torch  # only here, and only for auto and cuda

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    rocm = torch.version.hip is not None
    return DeviceFacts(
        kind="rocm" if rocm else "cuda",
        name=properties.name,
        capability=None if rocm else (properties.major, properties.minor),
        arch=getattr(properties, "gcnArchName", "").partition(":")[0] if rocm else "",
        memory_bytes=properties.total_memory,
    )
