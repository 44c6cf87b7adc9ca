"""The training step as a graph: traced, differentiated, placed, scheduled and replayed."""

from allreduce.graph.autodiff.scanning import scan
from allreduce.graph.core.scope import device
from allreduce.graph.core.seed import get_seed, set_seed
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.ops.collective import all_gather, all_reduce, replica_id
from allreduce.graph.ops.custom import register_op
from allreduce.graph.replicate.function import Function, function
from allreduce.graph.replicate.owner import current_replicator, default_replicator, scope_of
from allreduce.graph.replicate.replicator import Replicator
from allreduce.graph.trace.per_replica import PerReplica
from allreduce.graph.trace.printing import print_values as print
from allreduce.graph.trace.variable import Variable, colocate_with
from allreduce.graph.update.arenas import (
    consolidate,
    finish_update,
    load_optimizer_state,
    optimizer_state,
)
from allreduce.graph.update.update import UpdateRule, apply_gradients, gradients, minimize

__all__ = [
    "Function",
    "PerReplica",
    "Replicator",
    "Tensor",
    "UpdateRule",
    "Variable",
    "all_gather",
    "all_reduce",
    "apply_gradients",
    "colocate_with",
    "consolidate",
    "current_replicator",
    "default_replicator",
    "device",
    "finish_update",
    "function",
    "get_seed",
    "gradients",
    "load_optimizer_state",
    "minimize",
    "ops",
    "optimizer_state",
    "print",
    "register_op",
    "replica_id",
    "scan",
    "scope_of",
    "set_seed",
]
