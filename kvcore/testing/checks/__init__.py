"""The checks, and how cases run through them against a backend."""
