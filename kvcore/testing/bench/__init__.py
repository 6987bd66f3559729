"""Benchmarks of attention and cache writes: ratios against the bandwidth limit and against named peers."""
