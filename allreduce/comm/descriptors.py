"""How many more files this process may open: asked before members begin to meet."""

from allreduce.cluster.descriptors import shortage

__all__ = ["shortage"]
