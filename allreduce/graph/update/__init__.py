"""Optimizers' arenas and buckets, and the checks between ranks before an update."""
