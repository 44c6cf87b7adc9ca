"""`Metric`: a state that is summed over batches, replicas and ranks, and the value of the sum.

`fit` and `evaluate` sum states in float64, so that a value does not depend on how the samples were
cut into batches or shared among ranks.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import numpy as np

from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.naming import snake_case
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import show
from allreduce.graph.core.tensor import Tensor, TracedTensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.trace import line_of
from allreduce.keywords import Refusing
from allreduce.nn.core import keras_names, objects

Measure = Callable[..., Tensor]


class Metric(Refusing):
    """A value of all samples seen: by default the mean of a function's values per sample.

    A subclass with another state overrides `increment` and `value`.

    Attributes:
        direction: Whether a better value is larger ("max") or smaller ("min"), for callbacks whose
            mode is "auto"; None if that is not known.

    Args:
        function: Takes (y_true, y_pred) and gives one value per sample, `(batch,)`. None in a
            subclass that overrides `increment`.
        name: Its name in histories.

    Raises:
        UsageError: The function cannot be called, or the name is no string.
    """

    direction: ClassVar[Literal["max", "min"] | None] = None

    _elsewhere = keras_names.OF_METRICS

    def __init__(self, function: Measure | None = None, name: str | None = None) -> None:
        has_own = type(self).increment is not Metric.increment
        if not callable(function) and not (function is None and has_own):
            raise UsageError(f"a Metric's function takes (y_true, y_pred), and is not {function!r}")
        if name is not None and not isinstance(name, str):
            raise UsageError(f"the name of a metric is a string, not {name!r}")
        self.function = function
        self.name = str(name or getattr(function, "__name__", default_name(type(self))))
        self._state: np.ndarray | None = None

    def __call__(self, y_true: Any, y_pred: Any) -> Tensor:
        """Return the function's values, one per sample."""
        if self.function is None:
            raise UsageError(
                f"metric {self.name!r} has no value per sample; use update_state and result"
            )
        return self.function(y_true, y_pred)

    def increment(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> Tensor:
        """Compute a batch's contribution to the state; written with `ar.ops`, part of the step's
        graph.

        Args:
            y_true: Targets `(batch, …)`.
            y_pred: Predictions `(batch, …)`.
            sample_weight: `(batch,)`, or None if all count the same.

        Returns:
            A tensor whose shape does not depend on the batch, a sum over the batch's samples.

        Raises:
            ShapeError: The function gives a scalar.
        """
        values = as_tensor(self(y_true, y_pred))
        refuse_scalar(f"metric {self.name!r}", values)
        if values.ndim > 1:
            values = ops.mean(values, axis=tuple(range(1, values.ndim)))
        return weighted_sums(values, sample_weight)

    def value(self, state: np.ndarray) -> Any:
        """Compute the metric from the sum of all increments, in float64: a float or an array.

        Raises:
            ShapeError: `increment` is another class's, but this is not overridden.
        """
        if state.shape != (2,):
            raise ShapeError(
                f"metric {self.name!r}: {type(self).__name__}.increment gives a state of shape "
                f"{state.shape}, so the class needs a value(self, state), too, which makes the "
                "result of their sum"
            )
        return _ratio(state[0], state[1])

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Add a batch in a loop of one's own, in this process."""
        truth = as_tensor(y_true)
        prediction = None if y_pred is None else as_tensor(y_pred)
        if isinstance(truth, TracedTensor) or isinstance(prediction, TracedTensor):
            raise UsageError(
                f"{users_line()}: metric {self.name!r} cannot be updated inside a step; return "
                '{"loss": loss, **self.compute_metrics(x, y, y_pred)} from a train_step, and fit '
                "sums the metrics over batches and ranks"
            )
        added = np.asarray(self.increment(truth, prediction, sample_weight).numpy(), np.float64)
        self._state = added if self._state is None else self._state + added

    def result(self) -> Any:
        """Return the value of the state; NaN before the first `update_state`."""
        return float("nan") if self._state is None else self.value(self._state)

    def reset_state(self) -> None:
        """Reset the state."""
        self._state = None

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments as plain data, save for the function.

        They are attributes of the same names. A subclass whose constructor takes more than the
        library's class adds its own.
        """
        library = next(each for each in type(self).__mro__ if objects.is_ours(each))
        taken = inspect.signature(library).parameters
        return {name: getattr(self, name) for name in taken if name != "function"}

    def __repr__(self) -> str:
        return f"<metric {self.name}>"


def refuse_scalar(what: str, values: Tensor) -> None:
    """Refuse a result without a value per sample: its average would not be the whole's value."""
    if not values.ndim:
        raise ShapeError(
            f"{line_of(values)}: {what} is a scalar; give one value per sample, (batch,), which is "
            "averaged over all batches and replicas. A value of a whole batch, such as a "
            "correlation, cannot be averaged so: make it a subclass of ar.nn.metrics.Metric with a "
            "state"
        )


def default_name(kind: type[Metric]) -> str:
    """Return the name of this class in histories: "f1_score" for F1Score."""
    return snake_case(kind.__name__)


def _ratio(above: float, below: float) -> float:
    return float(above / below) if below else 0.0


def weighted_sums(values: Tensor, sample_weight: Any) -> Tensor:
    """Return the weighted sum of values `(batch,)`, and the sum of the weights: `(2,)`, float64."""
    values = ops.cast(values, "float64")
    return ops.stack([_total(values, sample_weight), _total(ops.ones_like(values), sample_weight)])


def _total(values: Tensor, sample_weight: Any) -> Tensor:
    return ops.sum(values if sample_weight is None else values * weights_of(values, sample_weight))


def weights_of(values: Tensor, sample_weight: Any) -> Tensor:
    """Return weights as float64, in the shape that multiplies the values `(batch, …)`."""
    weights = as_tensor(sample_weight)
    if weights.ndim == 2 and weights.shape[1] == 1:
        weights = ops.squeeze(weights, axis=1)
    if weights.ndim != 1 or weights.shape[0] != values.shape[0]:
        raise ShapeError(
            f"{users_line()}: sample_weight has shape {show(weights.shape)}; it is one weight per "
            f"sample of {show(values.shape)}"
        )
    shape = (values.shape[0], *(1 for _ in values.shape[1:]))
    return ops.reshape(ops.cast(weights, "float64"), shape)


def columns(name: str, y_true: Any, y_pred: Any) -> tuple[Tensor, Tensor]:
    """Return both as `(batch, n)` in float64."""
    truth, prediction = as_tensor(y_true), as_tensor(y_pred)
    one_column = (*prediction.shape, 1) == truth.shape or (*truth.shape, 1) == prediction.shape
    if truth.shape != prediction.shape and not one_column:
        raise ShapeError(
            f"{users_line()}: metric {name!r} takes y_true and y_pred of one shape, but found "
            f"{show(truth.shape)} and {show(prediction.shape)}"
        )
    truth, prediction = ops.cast(truth, "float64"), ops.cast(prediction, "float64")
    return _flat(truth), _flat(prediction)


def _flat(tensor: Tensor) -> Tensor:
    if tensor.ndim == 1:
        return ops.expand_dims(tensor, axis=1)
    return ops.flatten(tensor) if tensor.ndim > 2 else tensor
