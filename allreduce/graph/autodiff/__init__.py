"""Gradients, through scans too."""
