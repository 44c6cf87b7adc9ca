"""Run one traced function on every replica."""
