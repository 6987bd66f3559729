"""The conformance kit: it decides whether an attention backend is right."""
