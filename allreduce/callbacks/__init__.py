"""Callbacks of `fit`, under Keras's names. A new one is a file and a row, imported when used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from allreduce.errors import did_you_mean

if TYPE_CHECKING:
    from allreduce.callbacks.base import Callback as Callback
    from allreduce.callbacks.checkpoint import ModelCheckpoint as ModelCheckpoint
    from allreduce.callbacks.csv_logger import CSVLogger as CSVLogger
    from allreduce.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from allreduce.callbacks.history import History as History
    from allreduce.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from allreduce.callbacks.learning_rate import LearningRateScheduler as LearningRateScheduler
    from allreduce.callbacks.learning_rate import ReduceLROnPlateau as ReduceLROnPlateau
    from allreduce.callbacks.tensor_board import TensorBoard as TensorBoard
    from allreduce.callbacks.terminate_on_nan import TerminateOnNaN as TerminateOnNaN

TABLE = {
    "CSVLogger": "csv_logger",
    "Callback": "base",
    "EarlyStopping": "early_stopping",
    "History": "history",
    "LambdaCallback": "lambda_callback",
    "LearningRateScheduler": "learning_rate",
    "ModelCheckpoint": "checkpoint",
    "ReduceLROnPlateau": "learning_rate",
    "TensorBoard": "tensor_board",
    "TerminateOnNaN": "terminate_on_nan",
}

__all__ = sorted(TABLE)

_ELSEWHERE = {
    "BackupAndRestore": "save with ModelCheckpoint, and go on from ar.nn.load_model",
    "ProgbarLogger": "fit(verbose=1) shows a bar",
    "RemoteMonitor": "send logs from a LambdaCallback(on_epoch_end=…)",
    "SwapEMAWeights": "evaluate inside `with optimizer.averaged(variables):`",
}

if not TYPE_CHECKING:  # else type checkers would believe that every name is there

    def __getattr__(name: str) -> object:
        if name in TABLE:
            found = getattr(import_module(f"{__name__}.{TABLE[name]}"), name)
            globals()[name] = found
            return found
        hint = f": {_ELSEWHERE[name]}" if name in _ELSEWHERE else did_you_mean(name, __all__)
        # Without `name` a traceback adds a suggestion of its own.
        raise AttributeError(f"ar.callbacks has no {name!r}{hint}", name="")


def __dir__() -> list[str]:
    return sorted(__all__)
