"""Gradients on buffers: arenas and buckets. Needs no graph, so adapters can use it directly."""

from allreduce.reduction.arena import Arena, Layout, Span, lay_out
from allreduce.reduction.bucketing import BUCKET_BYTES, Bucket, plan_buckets

__all__ = ["BUCKET_BYTES", "Arena", "Bucket", "Layout", "Span", "lay_out", "plan_buckets"]
