"""The `torch` attention backend."""
