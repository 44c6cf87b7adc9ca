"""Which algorithm, chunk and stores a call takes: one table."""
