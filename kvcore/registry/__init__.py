"""Plugins: hook specifications, a loader that survives broken ones, and the choice of backends."""
