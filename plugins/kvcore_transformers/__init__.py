"""Any kvcore backend behind `model.generate()` of transformers.

from kvcore_transformers import PagedCache

cache = PagedCache.for_model(model, backend="torch")
model.generate(**inputs, past_key_values=cache)
"""

from __future__ import annotations

from kvcore_transformers.cache import PagedCache
from kvcore_transformers.versions import require_versions

__all__ = ["PagedCache"]

require_versions()
