"""The `flashinfer` attention backend."""
