"""Which algorithm, chunk and stores: one table, measured on this machine if its user wants."""
