"""The fit loop: exact means over all ranks, progress for people, agreement between ranks."""

from allreduce.graph.consistency.rank_check import Fact
from allreduce.training.arrays import Samples, describe
from allreduce.training.facts import check_equal, raising_on_all_ranks
from allreduce.training.fit import evaluate, fit, on_batch, predict
from allreduce.training.options import FitOptions
from allreduce.training.ranks import check_world, naming_rank, rank_of
from allreduce.training.trainable import Trainable

__all__ = [
    "Fact",
    "FitOptions",
    "Samples",
    "Trainable",
    "check_equal",
    "check_world",
    "describe",
    "evaluate",
    "fit",
    "naming_rank",
    "on_batch",
    "predict",
    "raising_on_all_ranks",
    "rank_of",
]
