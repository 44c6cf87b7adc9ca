"""Strategies: which devices of which ranks hold a replica."""

from importlib import import_module
from typing import TYPE_CHECKING

from allreduce.strategies.base import Strategy
from allreduce.strategies.mirrored import MirroredStrategy
from allreduce.strategies.multi_worker import MultiWorkerMirroredStrategy

if TYPE_CHECKING:
    from allreduce.strategies.coordinator import ClusterCoordinator
    from allreduce.strategies.parameter_server import ParameterServerStrategy

__all__ = [
    "ClusterCoordinator",
    "MirroredStrategy",
    "MultiWorkerMirroredStrategy",
    "ParameterServerStrategy",
    "Strategy",
]


def __getattr__(name: str) -> object:
    # These need gRPC, which takes longer to import than the rest.
    if name == "ParameterServerStrategy":
        return import_module("allreduce.strategies.parameter_server").ParameterServerStrategy
    if name == "ClusterCoordinator":
        return import_module("allreduce.strategies.coordinator").ClusterCoordinator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
