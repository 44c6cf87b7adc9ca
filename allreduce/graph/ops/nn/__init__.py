"""Operators of neural networks: layers, losses, dropout."""
