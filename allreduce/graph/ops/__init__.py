"""The operators: one file per family; `functions` gathers what people call."""
