"""The `triton` attention backend."""
