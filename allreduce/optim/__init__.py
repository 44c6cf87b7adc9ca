"""Optimizers: SGD and Adam, their base class, the table of their names, and schedules."""

from allreduce.optim import schedules
from allreduce.optim.adam import Adam
from allreduce.optim.base import Optimizer
from allreduce.optim.registry import deserialize, get, serialize
from allreduce.optim.sgd import SGD

__all__ = ["SGD", "Adam", "Optimizer", "deserialize", "get", "schedules", "serialize"]


def __dir__() -> list[str]:
    return sorted(__all__)
