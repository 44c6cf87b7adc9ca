"""Measure a case: its contestants, their processes and environments."""
