"""Why prompts were not reused: kept and worked out only with `cache.explain=true`."""
