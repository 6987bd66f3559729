"""The contract between the core and an attention backend, version 1.

`spec` and `query` are the declaration half and import no torch; `backend` and `batch` hold tensors.
"""
