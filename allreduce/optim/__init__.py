"""Optimizers, their base class, the table of their names, and schedules."""

from allreduce.optim import schedules
from allreduce.optim.adagrad import Adagrad
from allreduce.optim.adam import Adam, AdamW
from allreduce.optim.base import Optimizer
from allreduce.optim.lamb import Lamb
from allreduce.optim.lars import LARS
from allreduce.optim.lion import Lion
from allreduce.optim.options import Options
from allreduce.optim.registry import deserialize, get, serialize
from allreduce.optim.rmsprop import RMSprop
from allreduce.optim.sgd import SGD

__all__ = [
    "LARS",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Lamb",
    "Lion",
    "Optimizer",
    "Options",
    "RMSprop",
    "deserialize",
    "get",
    "schedules",
    "serialize",
]


def __dir__() -> list[str]:
    return sorted(__all__)
