"""The fit loop: exact means over all ranks, progress for people, agreement between ranks."""

from allreduce.graph.consistency.rank_check import Fact
from allreduce.training.facts import check_equal, telling
from allreduce.training.fit import FitOptions, History, evaluate, fit, predict
from allreduce.training.ranks import check_world, naming_rank, rank_of
from allreduce.training.trainable import Trainable

__all__ = [
    "Fact",
    "FitOptions",
    "History",
    "Trainable",
    "check_equal",
    "check_world",
    "evaluate",
    "fit",
    "naming_rank",
    "predict",
    "rank_of",
    "telling",
]
