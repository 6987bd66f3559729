"""Options of the FlashInfer backend, and what follows from them."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvcore.backend import AttentionQuery, ConfigError

FP8 = ("fp8_e4m3", "fp8_e5m2")
# Query heads a KV head for which the CUDA-core decode kernel is compiled (DISPATCH_GQA_GROUP_SIZE).
CUDA_CORE_GROUPS = (1, 2, 3, 4, 8)
PAGE_SIZES = (16, 32, 64)
LAYOUTS = ("auto", "nhd", "hnd")
DECODES = ("auto", "cuda_cores", "tensor_cores")
LEAST_WORKSPACE = 1 << 20


@dataclass(frozen=True)
class FlashInferOptions:
    """Options of the FlashInfer backend.

    Attributes:
        layout: ``nhd``, ``hnd``, or ``auto``: nhd, else hnd.
        decode: Kernels for one query a sequence: ``cuda_cores``, ``tensor_cores``, or ``auto``: tensor cores
            for fp8 caches and from 4 query heads a KV head on, and where CUDA cores have no kernel.
        workspace_bytes: Scratch memory for split keys, shared by all layers; zeroed once.
        emulate: Run the library's Python over a stand-in for its kernels, on a CPU; proves calls only.
    """

    layout: str = field(default="auto", metadata={"choices": LAYOUTS})
    decode: str = field(default="auto", metadata={"choices": DECODES})
    workspace_bytes: int = 128 << 20
    emulate: bool = False

    def __post_init__(self) -> None:
        for name, allowed in (("layout", LAYOUTS), ("decode", DECODES)):
            if getattr(self, name) not in allowed:
                raise ConfigError(
                    f"unknown {name} of the FlashInfer backend",
                    field=f"backends.flashinfer.{name}",
                    got=getattr(self, name),
                    allowed=allowed,
                )
        size = self.workspace_bytes
        if isinstance(size, bool) or not isinstance(size, int) or size < LEAST_WORKSPACE:
            raise ConfigError(
                "the workspace is too small",
                field="backends.flashinfer.workspace_bytes",
                got=size,
                allowed=f">= {LEAST_WORKSPACE}",
            )


def use_tensor_cores(query: AttentionQuery, options: FlashInferOptions) -> bool:
    """Whether decode goes through the tensor-core kernels."""
    if options.decode != "auto":
        return options.decode == "tensor_cores"
    few = query.group_size in CUDA_CORE_GROUPS and query.group_size < 4
    return not few or query.cache_dtype in FP8
