"""All-reduce for NumPy-style arrays, and data-parallel training on it.

import allreduce as ar

strategy = ar.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = ar.nn.Sequential([ar.nn.Dense(128, activation="relu"), ar.nn.Dense(10)])
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING

from allreduce import openblas as _openblas
from allreduce.importing import importing as _importing
from allreduce.importing import variables as _variables

_launches = any(word.endswith("allreduce.run") for word in sys.orig_argv)
_kernels = _openblas.choice(os.environ)
# The launcher needs no NumPy, whose threads it must not have when it forks.
if _kernels and "numpy" not in sys.modules and not _launches:
    with _variables(_kernels), _importing():
        import numpy as _numpy  # noqa: F401

if TYPE_CHECKING:
    from allreduce import callbacks, config, nn, observe, optim
    from allreduce.comm import ANY, Communicator, Work, init
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
        all_gather,
        all_reduce,
        colocate_with,
        device,
        gradients,
        print,
        register_op,
        replica_id,
        scan,
        set_seed,
    )
    from allreduce.graph.ops import functions as ops
    from allreduce.graph.replicate.function import (
        function,  # from the package, mypy would take the module
    )
    from allreduce.server.client.device_setter import device_setter
    from allreduce.server.client.session import Session
    from allreduce.server.task.server import Server
    from allreduce.strategies import MirroredStrategy, MultiWorkerMirroredStrategy, Strategy
    from allreduce.strategies.coordinator import ClusterCoordinator
    from allreduce.strategies.parameter_server import ParameterServerStrategy

    __version__: str

__all__ = [
    "ANY",
    "AllreduceError",
    "ClosedError",
    "ClusterCoordinator",
    "Communicator",
    "DeviceError",
    "InternalError",
    "JoinError",
    "MirroredStrategy",
    "MismatchError",
    "MultiWorkerMirroredStrategy",
    "NumericsError",
    "OutOfMemoryError",
    "ParameterServerStrategy",
    "PeerLostError",
    "PerReplica",
    "Server",
    "Session",
    "ShapeError",
    "Strategy",
    "Tensor",
    "TimeoutError",
    "UnsupportedError",
    "UsageError",
    "Variable",
    "Work",
    "all_gather",
    "all_reduce",
    "callbacks",
    "colocate_with",
    "config",
    "device",
    "device_setter",
    "function",
    "gradients",
    "init",
    "nn",
    "observe",
    "ops",
    "optim",
    "print",
    "register_op",
    "replica_id",
    "scan",
    "set_seed",
]

# Where names live that are neither errors nor in `allreduce.graph`. They are imported when they are
# first used, so that the launcher and a rank's helpers start without NumPy and the packages.
_HOMES = {
    "allreduce.comm": ("ANY", "Communicator", "Work", "init"),
    "allreduce.server.client.device_setter": ("device_setter",),
    "allreduce.server.task.server": ("Server",),
    "allreduce.server.client.session": ("Session",),
    "allreduce.strategies": ("MirroredStrategy", "MultiWorkerMirroredStrategy", "Strategy"),
    "allreduce.strategies.coordinator": ("ClusterCoordinator",),
    "allreduce.strategies.parameter_server": ("ParameterServerStrategy",),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}
_ERRORS = "allreduce.errors"
_PACKAGES = {
    *("callbacks", "cluster", "comm", "config", "errors", "graph", "nn", "observe", "optim"),
    "strategies",
}

_GRADIENTS = "ar.gradients(loss, variables) differentiates, inside an ar.function"
# Names of other libraries, and what does the same.
_ELSEWHERE = {
    "DistributedOptimizer": "make the optimizer in strategy.scope()",
    "GradientTape": _GRADIENTS,
    "grad": _GRADIENTS,
    "layers": "layers are in ar.nn",
    "losses": "losses are in ar.nn.losses",
    "metrics": "metrics are in ar.nn.metrics",
    "optimizers": "optimizers are in ar.optim",
    "rank": "comm = ar.init() gives comm.rank",
    "size": "comm = ar.init() gives comm.size",
}

if not TYPE_CHECKING:  # else type checkers would believe that every name is there

    def __getattr__(name: str) -> object:
        """Import a public name, or the module of one, at its first use."""
        if name in _PACKAGES:
            with _importing():
                return import_module(f"{__name__}.{name}")
        if name in __all__:
            home = _HOME.get(name, _ERRORS if name.endswith("Error") else "allreduce.graph")
            with _importing():
                found = getattr(import_module(home), name)
        elif name == "__version__":
            from importlib.metadata import version

            found = version(__name__)
        elif name in _ELSEWHERE:  # without `name` a traceback adds a suggestion of its own
            raise AttributeError(f"ar has no {name!r}: {_ELSEWHERE[name]}", name="")
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    # Without this file's own imports; with the packages that have been imported.
    used = (n for n, v in globals().items() if getattr(v, "__name__", "") == f"{__name__}.{n}")
    dunders = (name for name in globals() if name.startswith("__"))
    return sorted({*dunders, *used, *__all__, "__version__"})
