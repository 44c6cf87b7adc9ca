"""Operators that move, select or join elements."""
