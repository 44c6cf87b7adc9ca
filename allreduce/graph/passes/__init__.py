"""Passes: each a pure function from a Graph to a Graph, in a file of its own."""

from allreduce.graph.passes.bucket import bucket
from allreduce.graph.passes.order_reads import order_reads
from allreduce.graph.passes.prune import prune

__all__ = ["bucket", "order_reads", "prune"]
