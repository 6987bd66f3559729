"""One rank: it owns the arena, runs the model and binds every layer to its views."""
