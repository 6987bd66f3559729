"""The facts of a GPU as torch tells them: asked in this one place by planning, by backends and by the kit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvcore.attention.declaration import DeviceFacts

if TYPE_CHECKING:
    import torch


def gpu_facts(device: torch.device | int = 0) -> DeviceFacts | None:
    """Facts of a device that the installed torch can use, or None where it can use no GPU. Loads torch."""
    import torch

    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(device)
    rocm = torch.version.hip is not None
    return DeviceFacts(
        kind="rocm" if rocm else "cuda",
        name=properties.name,
        capability=None if rocm else (properties.major, properties.minor),
        arch=properties.gcnArchName.partition(":")[0] if rocm else "",
        memory_bytes=properties.total_memory,
    )
