"""The result of `compile`: loss, metrics and optimizer, and the steps made from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from allreduce import optim
from allreduce.errors import UsageError
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.trace.variable import Variable
from allreduce.nn import losses, metrics
from allreduce.nn.core.layer import Layer
from allreduce.nn.models.outputs import (
    Output,
    Settings,
    Values,
    by_name,
    output_names,
    plan_outputs,
)


class Steps:
    """The traced functions of a compiled model; made once, so that each is traced once.

    Args:
        model: The model.
        optimizer: An Optimizer or a name.
        settings: Losses and metrics, as `compile` takes them; kept unchanged.

    Raises:
        UsageError: A name is unknown, two metrics have the same name, or one has a name that
            histories give to validation data.
    """

    def __init__(self, model: Layer, optimizer: Any, settings: Settings) -> None:
        self._model = model
        self.optimizer = optim.get(optimizer)
        self.settings = settings
        self._outputs: dict[tuple[str, ...], list[Output]] = {}
        if not any(isinstance(each, Mapping) for each in vars(settings).values()):
            self._planned([""])  # errors that do not depend on the model are raised at once
        self._trained: frozenset[str] | None = None  # by the step, once it is traced
        self._known_changes: frozenset[str] = frozenset()

    @property
    def takes_class_numbers(self) -> bool:
        """Whether targets are class numbers, from 0 to below the number of outputs."""
        options = getattr(self.loss, "options", {})
        row = losses.row_of(self.loss)
        is_any = options.get("ignore_class") is None
        return row is not None and row.targets == "class numbers" and is_any

    @property
    def loss(self) -> Any:
        """The loss of a model with one output; with several, the argument of `compile`."""
        given = self.settings.loss
        return losses.get(given) if not isinstance(given, Mapping | list | tuple) else given

    @property
    def state_values(self) -> Mapping[str, Values]:
        """The functions from sums of metrics' states to values, by name."""
        planned = next(reversed(self._outputs.values()), [])
        return {name: value for each in planned for name, value in each.state_values.items()}

    def train_step(self, x: Any, y: Any, sample_weight: Any = None) -> Mapping[str, Tensor]:
        """Take one step; gives "loss" per sample and each metric, per sample or as an increment."""
        outputs = self._model(x, training=True)
        loss, results = self._evaluated(outputs, y, sample_weight)
        variables = self._model.trainable_variables
        if not variables and self._model.variables:
            raise UsageError(
                f"nothing of model {self._model.name!r} is to be trained: every layer or variable "
                "has trainable=False; make some trainable, and call compile again"
            )
        self.optimizer.minimize(loss, variables)
        self._trained = _names(variables)
        return results

    def test_step(self, x: Any, y: Any, sample_weight: Any = None) -> Mapping[str, Tensor]:
        """Compute the same in inference mode, without a step."""
        return self._evaluated(self._model(x, training=False), y, sample_weight)[1]

    train_step.__qualname__ = "Model.train_step"  # for messages, as people know them
    test_step.__qualname__ = "Model.test_step"

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

    def _evaluated(
        self, outputs: Any, y: Any, sample_weight: Any
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Compute the loss, and all results by the names that histories have."""
        names = output_names(self._model, outputs)
        planned = self._planned(names)
        total: Any = None
        parts: dict[str, Tensor] = {}
        measured: dict[str, Tensor] = {}
        predictions = by_name("the model's outputs", outputs, names)
        targets = by_name("y", y, names)
        weights = by_name("sample_weight", sample_weight, names, may_be_one=True)
        for output in planned:
            here = targets[output.name], predictions[output.name], weights[output.name]
            if output.loss is not None:
                part = output.lose(*here)
                share = part if output.weight == 1 else part * output.weight
                total = share if total is None else total + share
                if output.name:
                    parts[f"{output.name}_loss"] = part
            measured |= output.measure(*here)
        return total, {"loss": total, **parts, **measured}

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
            "loss": _mapped(lambda each: losses.serialize(losses.get(each)), given.loss),
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


def _names(variables: Iterable[Variable]) -> frozenset[str]:
    return frozenset(variable.name for variable in variables)


def restore(config: Mapping[str, Any], custom: Mapping[str, Any]) -> dict[str, Any]:
    """Give `compile`'s arguments as `describe` says, with `custom` classes and functions by name.

    Raises:
        UsageError: A name is neither known nor among `custom`.
    """

    def metric(each: Any) -> Any:
        return metrics.deserialize(each, custom)

    return {
        "optimizer": optim.deserialize(config["optimizer"], custom),
        "loss": _unmapped(lambda each: losses.deserialize(each, custom), config["loss"]),
        "loss_weights": config.get("loss_weights"),
        "metrics": _unmapped(metric, config["metrics"]),
        "weighted_metrics": _unmapped(metric, config.get("weighted_metrics")),
    }
