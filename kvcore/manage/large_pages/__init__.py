"""Placement `packed`: large pages, each with one group as its owner."""
