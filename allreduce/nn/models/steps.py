"""What `compile` settles: loss, metrics and optimizer, and the steps made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from allreduce import optim
from allreduce.errors import ShapeError, UsageError
from allreduce.graph.core.spec import BATCH, Dim, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.trace import line_of
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.update import warn_of_reduced
from allreduce.nn import losses, metrics
from allreduce.nn.core.layer import Layer


class Steps:
    """The traced functions of a compiled model; made once, so that each is traced once.

    Args:
        model: What computes.
        optimizer: An Optimizer or a name.
        loss: A name, a Loss or a function (y_true, y_pred).
        wanted: Metrics: names or functions.

    Raises:
        UsageError: A name is unknown, two metrics have the same name, or one has a name that
            histories give to validation data.
    """

    def __init__(
        self, model: Layer, optimizer: Any, loss: Any, wanted: Iterable[Any] | None
    ) -> None:
        self._model = model
        self.optimizer = optim.get(optimizer)
        self.loss = losses.get(loss)
        if isinstance(wanted, str):
            raise UsageError(f"metrics is a list: [{wanted!r}]")
        self.metrics: dict[str, metrics.Measure] = {}
        self._wanted = list(wanted or ())
        for each in self._wanted:
            name, function = metrics.get(each, self.loss)
            if name in self.metrics or name == "loss":
                raise UsageError(f"there are two metrics called {name!r}")
            if name.startswith("val_"):
                raise UsageError(
                    f"a metric is called {name!r}, but histories give what begins with val_ to "
                    "validation data; call it something else"
                )
            self.metrics[name] = function
        self._trained: frozenset[str] | None = None  # by the step, once it is traced
        self._known_changes: frozenset[str] = frozenset()

    @property
    def takes_class_numbers(self) -> bool:
        """Whether targets are class numbers, from 0 to below the number of outputs."""
        kind = self.loss.function if isinstance(self.loss, losses.Loss) else self.loss
        return kind is losses.sparse_categorical_crossentropy

    def train_step(self, x: Any, y: Any) -> Mapping[str, Tensor]:
        """Take one step; gives "loss" and each metric, one value per sample."""
        outputs = self._model(x, training=True)
        loss = self._loss(y, outputs)
        variables = self._model.trainable_variables
        if not variables and self._model.variables:
            raise UsageError(
                f"nothing of model {self._model.name!r} is to be trained: every layer or variable "
                "has trainable=False; make some trainable, and call compile again"
            )
        self.optimizer.minimize(loss, variables)
        self._trained = _names(variables)
        return {"loss": loss, **self._measure(y, outputs)}

    def test_step(self, x: Any, y: Any) -> Mapping[str, Tensor]:
        """Compute the same in inference mode, without a step."""
        outputs = self._model(x, training=False)
        return {"loss": self._loss(y, outputs), **self._measure(y, outputs)}

    train_step.__qualname__ = "Model.train_step"  # for messages, as people know them
    test_step.__qualname__ = "Model.test_step"

    def new_changes(self) -> str:
        """Say, once, what was frozen or unfrozen since the step was traced, which has not noticed.

        Returns:
            Nothing where there is nothing new.
        """
        if self._trained is None:
            return ""
        now = _names(self._model.trainable_variables)
        before, self._known_changes = self._known_changes, now ^ self._trained
        if self._known_changes in (before, frozenset()):
            return ""
        frozen, unfrozen = sorted(self._trained - now), sorted(now - self._trained)
        parts = [f"trains {', '.join(frozen)}"] if frozen else []
        parts += [f"does not train {', '.join(unfrozen)}"] if unfrozen else []
        return (
            f"the step still {' and '.join(parts)}: `trainable` was changed after it had been "
            "traced; call compile again"
        )

    def _loss(self, y: Any, outputs: Any) -> Tensor:
        name = f" {self.loss.name!r}" if isinstance(self.loss, losses.Loss) else ""
        loss = per_sample(f"the loss{name}", self.loss(y, outputs))
        warn_of_reduced(loss)
        return loss

    def _measure(self, y: Any, outputs: Any) -> dict[str, Tensor]:
        measured = {
            name: per_sample(f"metric {name!r}", metric(y, outputs))
            for name, metric in self.metrics.items()
        }
        for name, value in measured.items():
            if not value.ndim:
                raise ShapeError(
                    f"{line_of(value)}: metric {name!r} gave a scalar; a metric gives one value "
                    "per sample, (batch,), and fit and evaluate average these over all batches and "
                    "replicas. A value of a whole batch, such as a correlation, cannot be averaged "
                    "so: compute it from what model.predict returns"
                )
        return measured

    def describe(self) -> dict[str, Any]:
        """Describe what was compiled as plain data."""
        return {
            "optimizer": optim.serialize(self.optimizer),
            "loss": losses.serialize(self.loss),
            "metrics": [metrics.serialize(each) for each in self._wanted],
        }


def _names(variables: Iterable[Variable]) -> frozenset[str]:
    return frozenset(variable.name for variable in variables)


def restore(config: Mapping[str, Any], custom: Mapping[str, Any]) -> dict[str, Any]:
    """Give `compile`'s arguments as `describe` says, with `custom` classes and functions by name.

    Raises:
        UsageError: A name is neither known nor among `custom`.
    """
    return {
        "optimizer": optim.deserialize(config["optimizer"], custom),
        "loss": losses.deserialize(config["loss"], custom),
        "metrics": [metrics.deserialize(each, custom) for each in config["metrics"]],
    }


def per_sample(what: str, value: Any) -> Tensor:
    """Average what a loss or metric gives to one value per sample; leave a scalar as it is.

    Raises:
        UsageError: It is no tensor.
        ShapeError: Its first axis is not the batch, or another one is, too.
    """
    if not isinstance(value, Tensor):
        raise UsageError(f"{what} gave {value!r:.60}; it has to compute with tensors")
    if value.ndim and value.shape[0] != BATCH:
        raise ShapeError(
            f"{line_of(value)}: {what} has shape {show(value.shape)}; it gives one value per "
            "sample, (batch,)"
        )
    if any(isinstance(size, Dim) for size in value.shape[1:]):
        raise ShapeError(
            f"{line_of(value)}: {what} has shape {show(value.shape)}: it compares every sample "
            "with every other one, as NumPy broadcasts (batch,) against (batch, 1); give y the "
            "shape of the predictions, as by y[:, None], or reduce all axes but the first"
        )
    return ops.mean(value, axis=tuple(range(1, value.ndim))) if value.ndim > 1 else value
