"""All-reduce for NumPy-style arrays, and data-parallel training on it.

import allreduce as ar

strategy = ar.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = ar.nn.Sequential([ar.nn.Dense(128, activation="relu"), ar.nn.Dense(10)])
"""

from importlib.metadata import version as _version

from allreduce import config, nn, optim
from allreduce.comm import Communicator, Work, init
from allreduce.errors import (
    AllreduceError,
    ClosedError,
    DeviceError,
    InternalError,
    JoinError,
    MismatchError,
    NumericsError,
    OutOfMemoryError,
    PeerLostError,
    ShapeError,
    TimeoutError,
    UnsupportedError,
    UsageError,
)
from allreduce.graph import (
    PerReplica,
    Tensor,
    Variable,
    device,
    function,
    gradients,
    ops,
    set_seed,
)
from allreduce.strategies import MirroredStrategy, MultiWorkerMirroredStrategy, Strategy

__version__ = _version("allreduce")

__all__ = [
    "AllreduceError",
    "ClosedError",
    "Communicator",
    "DeviceError",
    "InternalError",
    "JoinError",
    "MirroredStrategy",
    "MismatchError",
    "MultiWorkerMirroredStrategy",
    "NumericsError",
    "OutOfMemoryError",
    "PeerLostError",
    "PerReplica",
    "ShapeError",
    "Strategy",
    "Tensor",
    "TimeoutError",
    "UnsupportedError",
    "UsageError",
    "Variable",
    "Work",
    "config",
    "device",
    "function",
    "gradients",
    "init",
    "nn",
    "ops",
    "optim",
    "set_seed",
]
