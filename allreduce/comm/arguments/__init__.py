"""Check and prepare the arguments of calls."""
