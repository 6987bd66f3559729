"""Kernels for backends to use, each with a torch twin; Triton is imported only when one is called."""
