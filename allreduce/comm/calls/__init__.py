"""Calls: signature, members, call site, segments and plan."""
