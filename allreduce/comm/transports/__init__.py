"""The transports, one folder each, and what they share."""
