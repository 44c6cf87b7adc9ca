"""NumPy's names and shape functions for tensors."""
