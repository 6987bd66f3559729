"""The `flash_attn` attention backend."""
