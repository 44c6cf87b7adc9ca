"""Run operators at once, outside of traced functions."""
