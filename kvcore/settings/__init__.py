"""What a user may set, as frozen dataclasses: Hydra's schema, the engine's settings and the checks, all in one."""
