"""A backend of kvcore inside vLLM: `KVCORE_BACKEND=NAME vllm serve MODEL`. vLLM is imported by `backend` alone."""
