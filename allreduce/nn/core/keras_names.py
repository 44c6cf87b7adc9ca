"""Arguments of Keras's methods and layers that do not exist here, and what does the same."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from allreduce.errors import UsageError, unknown_name
from allreduce.graph.trace.calls import NAMED

_WORKERS = "batches are made ahead of the step by one thread; a DataLoader may use more"
_BATCHES = "an iterable of batches is passed as x"

# By method: the argument, and what to do.
_ELSEWHERE: Mapping[str, Mapping[str, str]] = {
    "compile": {
        "jit_compile": "steps are always traced and compiled; run_eagerly=True switches it off",
        "steps_per_execution": "a step costs no Python loop; leave it out",
        "auto_scale_loss": "bfloat16 has float32's range and needs no loss scale",
    },
    "fit": {
        "workers": _WORKERS,
        "use_multiprocessing": _WORKERS,
        "max_queue_size": _WORKERS,
        "generator": _BATCHES,
        "nb_epoch": "it is called epochs",
    },
    "evaluate": {"workers": _WORKERS, "generator": _BATCHES},
    "predict": {"workers": _WORKERS, "generator": _BATCHES},
}

_PENALTY = "add the penalty to the loss in a train_step of your own; AdamW has weight_decay="
_SHAPE = "begin the model with ar.nn.Input(shape)"
_OF_LAYERS: Mapping[str, str] = {
    "activity_regularizer": _PENALTY,
    "batch_input_shape": _SHAPE,
    "bias_regularizer": _PENALTY,
    "data_format": "images are (batch, height, width, channels)",
    "embeddings_regularizer": _PENALTY,
    "input_dim": _SHAPE,
    "input_shape": _SHAPE,
    "kernel_constraint": "clip the variable between steps, in a callback",
    "kernel_regularizer": _PENALTY,
}


def refuse_of_layer(kind: type, named: Mapping[str, Any]) -> None:
    """Say of a keyword that a layer of this library does not take where the thing stands here.

    Raises:
        UsageError: It is one of Keras's, or no layer has it.
    """
    if not named or not kind.__module__.startswith("allreduce.nn."):
        return
    known = inspect.signature(kind).parameters
    for name in named:
        if name in known:
            continue
        if name in _OF_LAYERS:
            raise UsageError(f"{kind.__name__} takes no {name}=: {_OF_LAYERS[name]}")
        raise unknown_name("argument", name, known, kind.__name__)


def refuse(method: Callable[..., Any], unknown: Mapping[str, Any]) -> None:
    """Say of a method's unknown keyword where the thing stands here.

    Raises:
        UsageError: There is one.
    """
    for name in unknown:
        what = method.__name__
        if name in _ELSEWHERE.get(what, ()):
            raise UsageError(f"{what} takes no {name}=: {_ELSEWHERE[what][name]}")
        known = inspect.signature(method).parameters.values()
        raise unknown_name(
            "argument", name, [each.name for each in known if each.kind in NAMED], what
        )
