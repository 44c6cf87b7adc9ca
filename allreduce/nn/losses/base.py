"""`Loss`, a loss function with its options, and the checks that losses share."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from allreduce.devices.integers import integer, switch
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.keywords import Refusing
from allreduce.nn.core import keras_names

EPSILON = 1e-7  # Keras's; probabilities are clipped to [1e-7, 1 - 1e-7]


class Loss(Refusing):
    """A loss function with its options, usable wherever the function is.

    Args:
        function: Takes (y_true, y_pred) and the options; returns one value per sample.
        name: Its name in errors, and in histories if it is a metric.
        options: Arguments of the function, such as from_logits.

    Raises:
        UsageError: The function takes no such option, or a switch is neither True nor False.
    """

    _elsewhere = keras_names.OF_LOSSES

    def __init__(
        self, function: Callable[..., Tensor], name: str | None = None, **options: Any
    ) -> None:
        if not callable(function):
            raise UsageError(f"a Loss's function takes (y_true, y_pred), and is not {function!r}")
        if name is not None and not isinstance(name, str):
            raise UsageError(f"the name of a loss is a string, not {name!r}")
        self.function = function
        self.name = str(name or getattr(function, "__name__", type(function).__name__))
        self.options = {key: _checked(self, key, value) for key, value in options.items()}

    def __call__(self, y_true: Any, y_pred: Any) -> Tensor:
        return self.function(y_true, y_pred, **self.options)

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as plain data, save for the function.

        A subclass whose constructor takes more than these adds its own.
        """
        return {"name": self.name, **self.options}

    def __repr__(self) -> str:
        return f"<loss {self.name}{_listed(self.options)}>"


def _checked(loss: Loss, key: str, value: Any) -> Any:
    """Return an option as plain data."""
    takes = inspect.signature(loss.function).parameters
    if key not in takes:
        known = [name for name in takes if name not in ("y_true", "y_pred")]
        raise UsageError(f"loss {loss.name!r} takes no {key!r}; it takes {known}")
    if isinstance(takes[key].default, bool):
        switch(key, value)
    return value.item() if isinstance(value, np.generic) else value


def _listed(options: dict[str, Any]) -> str:
    set_ones = [f"{key}={value!r}" for key, value in options.items() if value]
    return f" ({', '.join(set_ones)})" if set_ones else ""


def same_shape(name: str, y_true: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
    """Refuse two shapes, which would broadcast; cast the truth to the prediction's dtype."""
    prediction = as_tensor(y_pred)
    if not np.issubdtype(prediction.dtype, np.floating):
        prediction = ops.cast(prediction, "float32")
    truth = as_tensor(y_true)
    if truth.shape != prediction.shape:
        raise ShapeError(
            f"{users_line()}: {name}: y_true has shape {show(truth.shape)} and y_pred "
            f"{show(prediction.shape)}; {_remedy(truth, prediction)}"
        )
    return ops.cast(truth, prediction.dtype), prediction


def _remedy(truth: Tensor, prediction: Tensor) -> str:
    if (*truth.shape, 1) == prediction.shape:
        return "they would be broadcast to every pair of samples; give y as y[:, None]"
    if truth.shape == (*prediction.shape, 1):
        return "they would be broadcast to every pair of samples; give y as y[:, 0]"
    if truth.shape == prediction.shape[:-1]:
        return (
            "for class numbers use sparse_categorical_crossentropy or sparse_categorical_accuracy"
        )
    return "they have to be the same"


def mean_of_last(values: Tensor) -> Tensor:
    """Average along the last axis; `(batch,)` stays as it is."""
    return ops.mean(values, axis=-1) if values.ndim > 1 else values


def check_fraction(what: str, value: Any) -> float:
    """Refuse what is no number from 0 to 1."""
    is_number = isinstance(value, int | float | np.integer | np.floating)
    if isinstance(value, bool) or not is_number or not 0 <= value <= 1:
        raise UsageError(f"{what} is a number from 0 to 1, not {value!r}")
    return float(value)


def check_class(what: str, value: Any) -> int | None:
    """Refuse what is neither a class number, any integer, nor None."""
    return None if value is None else integer(what, value)
