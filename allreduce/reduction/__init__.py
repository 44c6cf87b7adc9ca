"""Arenas, buckets and shards of gradients. Independent of graphs, so adapters use it directly."""

from allreduce.reduction.arena import Arena, ArenaShare, Layout, Span, lay_out
from allreduce.reduction.bucketing import (
    BUCKET_BYTES,
    Bucket,
    cut_buckets,
    header_alone,
    plan_buckets,
)
from allreduce.reduction.sharding import ShardMode, is_large, slice_of

__all__ = [
    "BUCKET_BYTES",
    "Arena",
    "ArenaShare",
    "Bucket",
    "Layout",
    "ShardMode",
    "Span",
    "cut_buckets",
    "header_alone",
    "is_large",
    "lay_out",
    "plan_buckets",
    "slice_of",
]
