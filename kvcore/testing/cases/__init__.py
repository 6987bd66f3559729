"""The cases: what is asked of a backend, around the plainest problem that it takes. Imports no torch."""
