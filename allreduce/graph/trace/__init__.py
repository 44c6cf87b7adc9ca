"""Trace a Python function into a graph, and key it by its inputs' signature."""
