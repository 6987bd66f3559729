"""Emulation of FlashAttention's compiled extension, for machines without a GPU. Proves calls, no kernels.

The Python of the installed flash-attn runs as it is. Only ``flash_attn_2_cuda``, which it imports, is ours:
it enforces the checks of the C++ source, with their texts, and computes the answer in float32.
"""

from kvcore_flash_attn.emulation.load import load_interface

__all__ = ["load_interface"]
