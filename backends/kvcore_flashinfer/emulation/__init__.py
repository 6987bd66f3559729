"""Emulation of FlashInfer's compiled modules, for machines without a GPU. Proves calls, no kernels.

The Python of the installed flashinfer runs as it is: wrappers, argument order, dtype checks, names of the
modules. Only what it would compile and load is ours: it enforces the checks of the C++ source and computes
the answer in float32.
"""

from kvcore_flashinfer.emulation.seam import active

__all__ = ["active"]
