"""Gradients on buffers: arenas and buckets. Needs no graph, so adapters can use it directly."""

from allreduce.reduction.arena import Arena, Layout, Span, lay_out
from allreduce.reduction.bucketing import (
    BUCKET_BYTES,
    Bucket,
    cut_buckets,
    header_alone,
    plan_buckets,
    span_bytes,
)
from allreduce.reduction.cutting import Costs, Cuts, Gradients, choose_cuts, modelled_end
from allreduce.reduction.sharding import Way, is_large, slice_of

__all__ = [
    "BUCKET_BYTES",
    "Arena",
    "Bucket",
    "Costs",
    "Cuts",
    "Gradients",
    "Layout",
    "Span",
    "Way",
    "choose_cuts",
    "cut_buckets",
    "header_alone",
    "is_large",
    "lay_out",
    "modelled_end",
    "plan_buckets",
    "slice_of",
    "span_bytes",
]
