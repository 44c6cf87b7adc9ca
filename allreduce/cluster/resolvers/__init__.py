"""Find the world: one file per source."""
