"""The machine's limit: native code that moves and adds what a collective does."""
