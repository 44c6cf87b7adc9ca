"""The result of `compile`: loss, metrics and optimizer, and the steps made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from allreduce import optim
from allreduce.errors import UsageError
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.trace.variable import Variable
from allreduce.nn import losses, metrics
from allreduce.nn.models.outputs import (
    Output,
    Settings,
    Values,
    by_name,
    output_names,
    per_sample,
    per_sample_metric,
    plan_outputs,
)


class Steps:
    """The traced functions of a compiled model; made once, so that each is traced once.

    Args:
        optimizer: An Optimizer or a name.
        settings: Losses and metrics, as `compile` takes them; kept unchanged.
    """

    def __init__(self, model: Any, optimizer: Any, settings: Settings) -> None:
        self._model = model
        self.optimizer = optim.get(optimizer)
        self.settings = settings
        self._outputs: dict[tuple[str, ...], list[Output]] = {}
        known = getattr(model, "output_names", [] if settings.by_output else [""])
        if known:
            self._planned(known)  # errors that do not depend on the first step are raised at once
        self._trained: frozenset[str] | None = None  # by the step, once it is traced
        self._known_changes: frozenset[str] = frozenset()

    @property
    def takes_class_numbers(self) -> bool:
        """Whether targets are class numbers, from 0 to below the number of outputs."""
        options = getattr(self.loss, "options", {})
        row = None if self.loss is None else losses.row_of(self.loss)
        is_any = options.get("ignore_class") is None
        return row is not None and row.targets == "class numbers" and is_any

    @property
    def measures(self) -> bool:
        """Whether `evaluate` has something to compute: a loss, or the model's own `test_step`."""
        return bool(self.settings.loss) or self._model.has_own("test_step")

    @property
    def loss(self) -> Any:
        """The loss of a model with one output; with several, the argument of `compile`."""
        planned, given = next(reversed(self._outputs.values()), []), self.settings.loss
        if len(planned) == 1:
            return planned[0].loss
        return (
            given
            if given is None or isinstance(given, Mapping | list | tuple)
            else losses.get(given)
        )

    @property
    def state_values(self) -> Mapping[str, Values]:
        """The functions from sums of metrics' states to values, by name."""
        planned = next(reversed(self._outputs.values()), [])
        return {name: value for each in planned for name, value in each.state_values.items()}

    @property
    def metrics(self) -> dict[str, metrics.Metric]:
        """All outputs' metrics, by their names in histories."""
        return {name: each for output in self._current() for name, each in output.metrics.items()}

    @property
    def directions(self) -> dict[str, str | None]:
        """The direction of each metric, by its name in histories, if the outputs are known."""
        planned = next(reversed(self._outputs.values()), [])
        return {
            name: metrics.direction_of(each)
            for output in planned
            for name, each in output.metrics.items()
        }

    @property
    def names(self) -> list[str]:
        """The names of the results, as `evaluated` orders them."""
        lost = [output.name for output in self._current() if output.loss is not None]
        total = ["loss"] if lost else []
        return [*total, *(f"{name}_loss" for name in lost if name), *self.metrics]

    def _current(self) -> list[Output]:
        """Return the outputs, as the latest step found them or as a functional model lists them."""
        names = getattr(self._model, "output_names", [])
        if names:
            return self._planned(names)
        if not self._outputs:
            raise UsageError(
                f"the outputs of model {self._model.name!r}, which compile names, are not known "
                "before its first step: call fit, evaluate or train_on_batch first"
            )
        return next(reversed(self._outputs.values()))

    def train_step(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Tensor]:
        """Take one step; gives "loss" per sample and each metric, per sample or as an increment.

        Called with one tuple, as a subclass's own step does, this is (x, y) or (x, y, weights).
        """
        x, y, sample_weight = unpacked(x, y, sample_weight)
        outputs = self._model(x, training=True)
        loss, results = self.evaluated(outputs, y, sample_weight)
        variables = self._model.trainable_variables
        if not variables and self._model.variables:
            raise UsageError(
                f"nothing of model {self._model.name!r} is to be trained: every layer or variable "
                "has trainable=False; make some trainable, and call compile again"
            )
        self.optimizer.minimize(loss, variables)
        self._trained = _names(variables)
        return results

    def test_step(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Tensor]:
        """Compute the same in inference mode, without a step."""
        x, y, sample_weight = unpacked(x, y, sample_weight)
        return self.evaluated(self._model(x, training=False), y, sample_weight)[1]

    def own_train_step(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Tensor]:
        """Take one step by the model's own `train_step(data)`."""
        found = self._given("train_step", x, y, sample_weight)
        self._trained = _names(self._model.trainable_variables)
        return found

    def own_test_step(self, x: Any, y: Any = None, sample_weight: Any = None) -> dict[str, Tensor]:
        """Compute by the model's own `test_step(data)`."""
        return self._given("test_step", x, y, sample_weight)

    train_step.__qualname__ = own_train_step.__qualname__ = "Model.train_step"  # for messages
    test_step.__qualname__ = own_test_step.__qualname__ = "Model.test_step"

    def _given(self, method: str, x: Any, y: Any, sample_weight: Any) -> dict[str, Tensor]:
        """Call a step of the model's own, and check what it returns."""
        data = (x, y) if sample_weight is None else (x, y, sample_weight)
        found = getattr(self._model, method)(data)
        what = f"{type(self._model).__name__}.{method}"
        if not isinstance(found, Mapping) or not found:
            raise UsageError(
                f"{what} returned {found!r:.60}; return a dict of the loss and the metrics by name"
            )
        states, may_be_scalars = self.state_values, self._loss_names
        checked = {}
        for name, value in found.items():
            check = per_sample if name in may_be_scalars else per_sample_metric
            checked[str(name)] = value if name in states else check(f"{name!r} of {what}", value)
        return checked

    @property
    def _loss_names(self) -> list[str]:
        """Name the results that may be scalars, which count as means over rows."""
        planned = next(reversed(self._outputs.values()), [])
        return ["loss", *(f"{output.name}_loss" for output in planned if output.loss is not None)]

    def new_changes(self) -> str:
        """Describe, once, the variables frozen or unfrozen since the step was traced, which ignores
        it.

        Returns:
            None if there is nothing new.
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

    def evaluated(
        self, outputs: Any, y: Any, sample_weight: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss, and all results by the names that histories have."""
        total: Any = None
        parts: dict[str, Tensor] = {}
        measured: dict[str, Tensor] = {}
        for output, *here in self._by_output(outputs, y, sample_weight):
            if output.loss is not None:
                part = output.lose(*here)
                share = part if output.weight == 1 else part * output.weight
                total = share if total is None else total + share
                if output.name:
                    parts[f"{output.name}_loss"] = part
            measured |= output.measure(*here)
        if total is None:
            raise UsageError(
                "no output has a loss: give compile a loss=, or the model a train_step"
            )
        return total, {"loss": total, **parts, **measured}

    def measured(self, outputs: Any, y: Any, sample_weight: Any) -> dict[str, Tensor]:
        """Compute the metrics alone."""
        found: dict[str, Tensor] = {}
        for output, *here in self._by_output(outputs, y, sample_weight):
            found |= output.measure(*here)
        return found

    def _by_output(
        self, outputs: Any, y: Any, sample_weight: Any
    ) -> list[tuple[Output, Any, Any, Any]]:
        """Give each output with its targets, its prediction and its weights."""
        if y is None:
            raise UsageError(
                "y is missing: the loss and the metrics compare it with the outputs; pass targets, "
                "or give the model a train_step of its own"
            )
        names = output_names(self._model, outputs)
        predictions = by_name("the model's outputs", outputs, names)
        targets = by_name("y", y, names)
        weights = by_name("sample_weight", sample_weight, names, may_be_one=True)
        return [
            (each, targets[name], predictions[name], weights[name])
            for name, each in zip(names, self._planned(names), strict=True)
        ]

    def _planned(self, names: Sequence[str]) -> list[Output]:
        key = tuple(names)
        if key not in self._outputs:
            self._outputs[key] = plan_outputs(self.settings, list(names))
        return self._outputs[key]

    def describe(self) -> dict[str, Any]:
        """Describe the compilation as plain data."""
        given = self.settings
        return {
            "optimizer": optim.serialize(self.optimizer),
            "loss": _mapped(lambda each: losses.serialize(losses.get(each)), given.loss) or {},
            "loss_weights": given.loss_weights,
            "metrics": _mapped(metrics.serialize, given.metrics or []),
            "weighted_metrics": _mapped(metrics.serialize, given.weighted_metrics or []),
        }


def _mapped(function: Callable[[Any], Any], given: Any) -> Any:
    """Apply a function to each item of a dict by output, a list, or both."""
    if isinstance(given, Mapping):
        return {"outputs": {name: _mapped(function, each) for name, each in given.items()}}
    if isinstance(given, list | tuple):
        return [_mapped(function, each) for each in given]
    return None if given is None else function(given)


def _unmapped(function: Callable[[Any], Any], config: Any) -> Any:
    if isinstance(config, Mapping) and "outputs" in config:
        return {name: _unmapped(function, each) for name, each in config["outputs"].items()}
    if isinstance(config, list):
        return [_unmapped(function, each) for each in config]
    return None if config is None else function(config)


def unpacked(x: Any, y: Any, sample_weight: Any) -> tuple[Any, Any, Any]:
    """Take the one argument of a step apart if it is a tuple (x, y) or (x, y, sample_weight)."""
    if y is None and sample_weight is None and isinstance(x, tuple) and len(x) in (2, 3):
        x, y, sample_weight = (*x, None)[:3]
    return x, y, sample_weight


def _names(variables: Iterable[Variable]) -> frozenset[str]:
    return frozenset(variable.name for variable in variables)


def restore(config: Mapping[str, Any], custom: Mapping[str, Any]) -> dict[str, Any]:
    """Give `compile`'s arguments as `describe` says; `custom` has classes and functions by name."""

    def metric(each: Any) -> Any:
        return metrics.deserialize(each, custom)

    return {
        "optimizer": optim.deserialize(config["optimizer"], custom),
        "loss": _unmapped(lambda each: losses.deserialize(each, custom), config["loss"] or None),
        "loss_weights": config.get("loss_weights"),
        "metrics": _unmapped(metric, config["metrics"]) or None,
        "weighted_metrics": _unmapped(metric, config.get("weighted_metrics")) or None,
    }
