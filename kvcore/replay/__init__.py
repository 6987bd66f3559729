"""The real scheduler and manager on a recorded trace, in simulated time. No model, no torch."""
