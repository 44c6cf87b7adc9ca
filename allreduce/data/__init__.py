"""Arrays in, batches for replicas out: plans, shuffling, and one batch ahead of the step."""

from allreduce.data.batches import ArrayBatches, DistributedDataset, distribute, shuffled
from allreduce.data.sharding import Piece, Plan, Replicated, Sharded, check_batch_size, split_rows

__all__ = [
    "ArrayBatches",
    "DistributedDataset",
    "Piece",
    "Plan",
    "Replicated",
    "Sharded",
    "check_batch_size",
    "distribute",
    "shuffled",
    "split_rows",
]
