"""Operators without a kernel: values, changes and exchanges that the executor handles.

Their specs are set when they are recorded, so their shape rule only returns them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from allreduce.graph.core.op_table import Attrs, Kind, register
from allreduce.graph.core.spec import Spec


def _as_recorded(specs: Sequence[Spec], attrs: Attrs) -> Spec:
    return specs[0] if specs else Spec((), np.dtype(np.int64))


ROWS: tuple[tuple[str, Kind], ...] = (
    ("placeholder", "source"),  # fed by the caller; name
    ("constant", "source"),  # value
    ("runtime", "source"),  # a run-time value of the executor; name
    ("read", "source"),  # variable; copy: whether a later change must not show
    ("assign", "effect"),  # variable <- input
    ("print", "effect"),  # parts, sep
    ("apply_gradients", "effect"),  # rule, variables; (count, *gradients); replaced by bucketing:
    # plan, and adds where gradients of several micro-batches are added up:
    ("store_count", "effect"),  # the number of samples behind the gradients
    ("store_gradient", "effect"),  # span: a gradient, where it will be reduced
    ("clear_gradients", "effect"),  # zeros and no samples: in the null program, or before adding
    ("all_reduce_bucket", "collective"),  # plan, bucket
    ("gradient_norm", "effect"),  # plan, rule: scales all of an arena's gradients
    ("all_reduce_norm", "collective"),  # the same, of own slices
    ("update_bucket", "effect"),  # plan, bucket, rule
    ("update_slices", "collective"),  # the same: reduced and updated by all, each its own slice
    ("sum_slices", "collective"),  # the same: only reduced, for an update after the norm
    ("reduce_scatter_bucket", "collective"),  # the same: to each member its own slice's sums
    ("update_own", "effect"),  # the same: the own slice, which the others get by the next one
    ("all_gather_bucket", "collective"),  # the same
    ("send", "transfer"),  # edge, source, destination, of_samples; no input: only that it is time
    ("receive", "transfer"),  # the same
    # Where a device cannot read the host's memory, nor the host the device's:
    ("feed", "transfer"),  # an argument of a call, on the device
    ("snapshot", "compute"),  # a copy of a value, in memory for the caller
    ("fetch", "transfer"),  # a result of a step, on the host
)

for _name, _kind in ROWS:
    register(_name, shape=_as_recorded, kind=_kind, host=_name == "print")
