"""The group leader: a gRPC service through which ranks meet."""
