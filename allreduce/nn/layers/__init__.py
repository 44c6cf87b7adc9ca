"""Layers, one file each; their rows are in `allreduce/nn/models/registry.py`."""
