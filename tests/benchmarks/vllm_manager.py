"""vLLM's own `KVCacheManager` on a CPU, driven by what its scheduler calls; no GPU and no compiled code of it.

Once, in an environment of its own (some minutes; torch of the CPU build comes with kvcore's own set-up)::

    pip install "setuptools>=77,<81" setuptools_scm setuptools-rust packaging wheel ninja cmake jinja2
    VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=0.33.0 pip download --no-deps --no-binary vllm \
        --no-build-isolation -d . vllm==0.33.0 && tar xzf vllm-0.33.0.tar.gz
    pip install psutil regex cachetools requests tqdm blake3 py-cpuinfo "transformers>=5.16.1,<5.21" pydantic msgspec \
        pyzmq cbor2 xxhash pyyaml einops cloudpickle pillow filelock prometheus_client six pybase64 orjson aiohttp \
        openai_harmony openai uvloop fastapi partial_json_parser
    pip install --no-deps compressed-tensors xgrammar llguidance
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

now = time.thread_time


class Vllm:
    """One manager with a block size of 16: a full group, and windows of 1024 tokens beside it.

    Args:
        folder: The source of vLLM.
        blocks: Blocks of the pool.
        groups: KV cache groups.
    """

    def __init__(self, folder: Path, blocks: int, groups: int = 1) -> None:
        os.environ.setdefault("VLLM_TARGET_DEVICE", "empty")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        import torch
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
        from vllm.v1.request import Request

        shape = {"block_size": 16, "num_kv_heads": 8, "head_size": 128, "dtype": torch.bfloat16}
        specs = [
            FullAttentionSpec(**shape),
            *(SlidingWindowSpec(**shape, sliding_window=1024) for _ in range(groups - 1)),
        ]
        hash_function = get_hash_fn_by_name("sha256")
        init_none_hash(hash_function)
        self._hasher = get_request_block_hasher(16, hash_function)
        self._request: Any = Request
        self._sampling = SamplingParams(max_tokens=100_000)
        self._sampling.update_from_generation_config({}, eos_token_id=2)
        self._made = 0
        self.manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=blocks,
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)],
            ),
            max_model_len=131_072,
            scheduler_block_size=16,
            hash_block_size=16,
            max_in_flight_tokens=8192,
            enable_caching=True,
        )

    def begin(self, prompt: list[int]) -> Any:
        """A request; its digests are made here."""
        self._made += 1
        return self._request(
            request_id=f"r{self._made}",
            prompt_token_ids=prompt,
            sampling_params=self._sampling,
            pooling_params=None,
            block_hasher=self._hasher,
        )

    def prefill(self, request: Any) -> int:
        """The whole prompt in one step; returns the hit."""
        blocks, hit, _ = self.manager.get_computed_blocks(request)
        self._allocate(request, request.num_tokens - hit, hit, blocks)
        request.num_computed_tokens = request.num_tokens
        return int(hit)

    def grow(self, requests: list[Any], tokens: list[int]) -> float:
        """A step in which each request computes these new tokens; seconds of its calls, the digests among them."""
        started = now()
        for request in requests:
            request.append_output_token_ids(tokens)
            self._allocate(request, len(tokens))
        taken = now() - started
        for request in requests:
            request.num_computed_tokens = request.num_tokens
        return taken

    def _allocate(self, *args: Any) -> None:
        if self.manager.allocate_slots(*args) is None:
            raise RuntimeError("vLLM's manager has no block left")
