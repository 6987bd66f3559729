"""`DeviceFacts` of a configuration. Only `run` asks torch; planning asks the driver, without torch."""

from __future__ import annotations

import ctypes
import platform
import re
from importlib.util import find_spec
from pathlib import Path

from kvcore.attention.declaration import DeviceFacts
from kvcore.attention.device import gpu_facts
from kvcore.config.schema import DeviceKeys
from kvcore.errors import ConfigError

# CUdevice_attribute of the driver interface.
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76


def device_facts(keys: DeviceKeys, *, ask_torch: bool = False) -> DeviceFacts:
    """The device that a configuration names.

    Args:
        keys: The node `device`.
        ask_torch: Whether torch, which is about to be loaded anyway, decides what it can use.

    Raises:
        ConfigError: `cuda` is asked for and this machine has none, or the facts are malformed.
    """
    if keys.preset == "cpu":
        return _cpu()
    if keys.preset in ("auto", "cuda"):
        found = gpu_facts() if ask_torch else _by_driver()
        if found is None and keys.preset == "cuda":
            raise ConfigError(
                "this machine has no GPU that the installed torch can use",
                field="device",
                got="cuda",
                allowed="cpu, or a preset of conf/device for planning",
                remedy="use device=cpu, or install a CUDA build of torch and its driver",
            )
        return found or _cpu()
    if keys.capability is not None and len(keys.capability) != 2:
        raise ConfigError(
            "a compute capability is two numbers",
            field="device.capability",
            got=keys.capability,
            allowed="[major, minor]",
        )
    return DeviceFacts(
        kind=keys.kind,
        name=keys.name,
        capability=(keys.capability[0], keys.capability[1]) if keys.capability else None,
        arch=keys.arch,
        memory_bytes=keys.memory_bytes or 0,
        present=False,
    )


def _cpu() -> DeviceFacts:
    import psutil  # late: a plan for another device needs it not

    return DeviceFacts("cpu", _cpu_name(), memory_bytes=int(psutil.virtual_memory().total))


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        found = re.search(r"^model name\s*:\s*(.+)$", info.read_text(errors="replace"), re.MULTILINE)
        if found:
            return found[1].strip()
    return platform.processor() or platform.machine()


def _by_driver() -> DeviceFacts | None:
    """What torch would find, without loading it: its build tells the kind, the driver the device."""
    build = _torch_build()
    if build is None:
        return None
    if build == "rocm":
        return gpu_facts()  # no small interface tells the architecture
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    count, device, memory = ctypes.c_int(), ctypes.c_int(), ctypes.c_size_t()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)) or count.value < 1:
        return None
    name, major, minor = ctypes.create_string_buffer(256), ctypes.c_int(), ctypes.c_int()
    failed = (
        driver.cuDeviceGet(ctypes.byref(device), 0)
        or driver.cuDeviceGetName(name, len(name), device)
        or driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
        or driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, device)
        or driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, device)
    )
    if failed:
        return None
    capability = (major.value, minor.value)
    return DeviceFacts("cuda", name.value.decode(errors="replace"), capability, memory_bytes=memory.value)


def _torch_build() -> str | None:
    """``cuda`` or ``rocm``, or None for a CPU build; read from torch's version file, not by importing it."""
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    version = Path(spec.origin).with_name("version.py")
    text = version.read_text() if version.is_file() else ""
    for kind, name in (("rocm", "hip"), ("cuda", "cuda")):
        if re.search(rf"^{name}\b[^=]*=\s*['\"]", text, re.MULTILINE):
            return kind
    return None
