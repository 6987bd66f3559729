"""The `vllm_cpu` attention backend: vLLM's compiled CPU kernels, loaded without vLLM."""
