"""The base class of layers, and shared code: checks, configs, and the current calls."""
