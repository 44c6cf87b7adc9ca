"""Choose the algorithm of a call by its size."""
