"""The side of one task of a cluster: its server, its connections, its parts of graphs."""
