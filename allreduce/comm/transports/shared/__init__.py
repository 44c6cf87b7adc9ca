"""Collectives between threads and processes of one host, in memory that all members map."""
