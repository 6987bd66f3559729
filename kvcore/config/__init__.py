"""Hydra: the schema of every key, composition, sweeps, and the way from a config to an engine."""
