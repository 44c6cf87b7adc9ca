"""Draw a step's graph."""
