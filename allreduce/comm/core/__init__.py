"""Transports' interface, and the progress of started calls."""
