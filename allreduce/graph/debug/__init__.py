"""Checks at run time: NaN and infinity, and writes outside of buffers."""
