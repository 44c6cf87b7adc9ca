"""What a parameter server does: keep parts of arenas, update them, deal out rows. No network."""
