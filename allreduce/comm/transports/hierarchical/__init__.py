"""Collectives over several hosts: shared memory inside each, TCP or MPI between them."""
