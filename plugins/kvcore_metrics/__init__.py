"""Step metrics as JSON lines and in Prometheus text form."""
