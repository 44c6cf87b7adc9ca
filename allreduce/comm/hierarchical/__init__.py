"""Collectives over several hosts: shared memory inside each, TCP between them."""
