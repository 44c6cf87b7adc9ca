"""Collectives that MPI carries out, for fabrics that only MPI drives."""
