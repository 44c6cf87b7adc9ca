"""Strategies: which devices of which ranks hold a replica."""

from allreduce.strategies.base import Strategy
from allreduce.strategies.mirrored import MirroredStrategy
from allreduce.strategies.multi_worker import MultiWorkerMirroredStrategy
from allreduce.strategies.parameter_server import ParameterServerStrategy

__all__ = [
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "Strategy",
]


def __dir__() -> list[str]:
    return sorted(__all__)
