"""The operators: one file per family; `functions` gathers the public ones."""
