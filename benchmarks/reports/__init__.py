"""Report what was measured: tables, JSON, pictures, and goals."""
