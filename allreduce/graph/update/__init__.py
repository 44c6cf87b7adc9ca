"""Optimizers' arenas, their buckets, and what ranks agree on before an update."""
