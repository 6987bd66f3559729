"""Requests, scheduling and generation on top of the cache."""
