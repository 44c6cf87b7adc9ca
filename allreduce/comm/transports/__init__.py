"""The transports, one folder each, and code that they share."""
