"""Where workers run: one file a kind. Process and Ray executors come later behind the same base."""
