"""MPI's library and launcher."""
