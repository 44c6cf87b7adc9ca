"""The settings of `compile` for each output of a model: loss, weight and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np

from allreduce.errors import ShapeError, UsageError, did_you_mean
from allreduce.graph.core.spec import BATCH, Dim, show
from allreduce.graph.core.tensor import Tensor
from allreduce.graph.ops import functions as ops
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.trace import line_of
from allreduce.graph.update.update import warn_reduced_loss
from allreduce.nn import activations, losses, metrics
from allreduce.nn.core.layer import Layer
from allreduce.nn.metrics.base import refuse_scalar

Values = Callable[[np.ndarray], Any]

_NUMBERED = ("loss", "loss_weights")  # their lists have one entry for each output
_NO_PROBABILITIES = ("linear", "relu", "tanh", "gelu")  # their outputs may be below 0 or above 1


@dataclass
class Settings:
    """The arguments of `compile` that speak of outputs, as given."""

    loss: Any
    loss_weights: Any = None
    metrics: Any = None
    weighted_metrics: Any = None

    @property
    def by_output(self) -> bool:
        """Whether one is a dict or list of parts for several outputs."""
        return any(
            isinstance(given, Mapping)
            or (
                isinstance(given, list | tuple)
                and (len(given) > 1 if key in _NUMBERED else any(map(_is_list, given)))
            )
            for key, given in vars(self).items()
        )


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


@dataclass
class Output:
    """One output.

    Attributes:
        name: Its name; "" for the only one of a model.
        loss: Its loss; None if it has none.
        weight: The factor of the loss in the sum.
        measures: Metrics by their names in histories.
        weighted: Those that count samples by their weights.
    """

    name: str
    loss: Callable[[Any, Any], Tensor] | None
    weight: float = 1.0
    measures: dict[str, metrics.Measure] = field(default_factory=dict)
    weighted: dict[str, metrics.Measure] = field(default_factory=dict)

    def lose(self, y: Any, prediction: Any, sample_weight: Any) -> Tensor:
        """Compute the loss per sample, or a scalar, times the samples' weights."""
        assert self.loss is not None
        name = f" {self.loss.name!r}" if isinstance(self.loss, losses.Loss) else ""
        what = f"the loss{name}" + (f" of output {self.name!r}" if self.name else "")
        if losses.row_of(self.loss) is not None:  # a user's own loss may take a dict
            _check_single("y", y)
        _check_single("sample_weight", sample_weight)
        value = self.loss(y, prediction)
        if sample_weight is not None:
            value = _weighted(what, value, sample_weight)
        value = per_sample(what, value)
        warn_reduced_loss(value)
        return value

    def measure(self, y: Any, prediction: Any, sample_weight: Any) -> dict[str, Tensor]:
        """Compute each metric: per sample, or the increment of its state."""
        found = {
            name: _increment(name, measure, (y, prediction, None))
            if has_state(measure)
            else per_sample_metric(f"metric {name!r}", measure(y, prediction))
            for name, measure in self.measures.items()
        }
        for name, measure in self.weighted.items():
            found[name] = _increment(name, measure, (y, prediction, sample_weight))
        return found

    @cached_property
    def metrics(self) -> dict[str, metrics.Metric]:
        """All metrics by their names in histories; a function becomes a Metric."""
        found = {**self.measures, **self.weighted}
        return {
            name: each if isinstance(each, metrics.Metric) else metrics.Metric(each, name)
            for name, each in found.items()
        }

    @property
    def state_values(self) -> dict[str, Values]:
        """The functions from sums of states to values."""
        with_state = {name: each for name, each in self.measures.items() if has_state(each)}
        return {name: _metric(each).value for name, each in {**with_state, **self.weighted}.items()}


def has_state(measure: metrics.Measure) -> bool:
    """Return whether a metric is more than the mean of one value per sample."""
    if not isinstance(measure, metrics.Metric):
        return False
    own, base = type(measure), metrics.Metric
    return own.increment is not base.increment or own.value is not base.value


def _metric(measure: metrics.Measure) -> metrics.Metric:
    return measure if isinstance(measure, metrics.Metric) else metrics.Metric(measure)


def plan_outputs(settings: Settings, names: Sequence[str]) -> list[Output]:
    """Resolve the arguments of `compile` for a model's outputs.

    Histories call the results of a single output by its metrics' names alone, as Keras does.

    Args:
        names: The outputs' names; [""] for a single one without a name.
    """
    given = {
        key: _by_output(key, getattr(settings, key), names)
        for key in ("loss", "loss_weights", "metrics", "weighted_metrics")
    }
    outputs = []
    for name in names:
        loss, prefix = given["loss"][name], name if len(names) > 1 else ""
        output = Output(prefix, None if loss is None else losses.get(loss))
        weight = given["loss_weights"][name]
        output.weight = 1.0 if weight is None else _number(weight)
        taken = {"loss"}
        for key, found in (("metrics", output.measures), ("weighted_metrics", output.weighted)):
            for each in _listed(key, given[key][name]):
                short, measure = metrics.get(each, output.loss)
                if key == "weighted_metrics" and _named(short, prefix) in taken:
                    short = f"weighted_{short}"  # Keras's name beside the unweighted metric
                found[_fresh(short, prefix, taken)] = measure
        outputs.append(output)
    return outputs


def output_names(model: Any, outputs: Any) -> list[str]:
    """Name a model's outputs: a dict's keys, the model's names, or the numbers of a list.

    Returns:
        The names; [""] for a single output of a model that has no names.
    """
    if isinstance(outputs, Mapping):
        return [str(key) for key in outputs]
    is_list = isinstance(outputs, list | tuple)
    named = getattr(model, "output_names", None)
    if named and len(named) == (len(outputs) if is_list else 1):
        return [str(name) for name in named]
    if not is_list:
        return [""]
    return [f"output_{place}" for place in range(len(outputs))]


def by_name(
    what: str, given: Any, names: Sequence[str], may_be_one: bool = False
) -> dict[str, Any]:
    """Give each output its part of y, of the predictions or of the samples' weights.

    Args:
        what: Its name in errors.
        given: A dict by name, a list in the outputs' order, or for one output its array.
        may_be_one: Whether one array may be for all of them.
    """
    if names == [""]:
        return {"": given}
    if may_be_one and not isinstance(given, Mapping | list | tuple):
        return dict.fromkeys(names, given)
    if isinstance(given, Mapping) and set(given) == set(names):
        return {name: given[name] for name in names}
    if isinstance(given, list | tuple) and len(given) == len(names):
        return dict(zip(names, given, strict=True))
    if len(names) == 1 and not isinstance(given, Mapping | list | tuple):
        return {names[0]: given}
    raise UsageError(
        f"{what} is {_found(given)}, but the model's outputs are {', '.join(map(repr, names))}; "
        "give a dict by these names, or a list of as many"
    )


def _found(given: Any) -> str:
    if isinstance(given, Mapping):
        return f"a dict of {', '.join(map(repr, given))}"
    if isinstance(given, list | tuple):
        return f"a {type(given).__name__} of {len(given)} array{'s' * (len(given) != 1)}"
    return "one array"


def _check_single(what: str, given: Any) -> None:
    """Refuse several arrays for a single output without a name."""
    if isinstance(given, Mapping | list | tuple):
        raise UsageError(
            f"{what} is {_found(given)}, but the model has one output, which has no name; give "
            "one array"
        )


def _by_output(key: str, given: Any, names: Sequence[str]) -> dict[str, Any]:
    """Give each output its part of an argument."""
    if isinstance(given, Mapping):
        unknown = [each for each in given if each not in names]
        if unknown and names == [""]:
            raise UsageError(
                f"{key} names output {unknown[0]!r}, but the model has one output without a name; "
                f"give {key} without a dict"
            )
        if unknown:
            hint = did_you_mean(unknown[0], names)
            raise UsageError(
                f"{key} names output {unknown[0]!r}, but the model's outputs are "
                f"{', '.join(map(repr, names))}{hint}"
            )
        return {name: _one(key, given.get(name)) for name in names}
    if len(names) == 1:
        alone = isinstance(given, list | tuple) and len(given) == 1
        if alone and (key in _NUMBERED or isinstance(given[0], list | tuple)):
            (given,) = given
        elif isinstance(given, list | tuple) and key in _NUMBERED:
            found = f"{key} has {len(given)} entries"
            raise UsageError(f"{found}, but the model has one output: give one")
        return {names[0]: given}
    if isinstance(given, list | tuple):
        if len(given) != len(names):
            raise UsageError(
                f"{key} has {len(given)} entries, but the model has {len(names)} outputs "
                f"({', '.join(map(repr, names))}); give one for each, or a dict by name"
            )
        return {name: _one(key, each) for name, each in zip(names, given, strict=True)}
    if given is not None and key in ("metrics", "weighted_metrics"):
        raise UsageError(f"{key} of a model with several outputs is a dict by output, or a list")
    return dict.fromkeys(names, given)


def _one(key: str, given: Any) -> Any:
    """Take an output's metric that stands without a list: {"price": "mae"}."""
    return [given] if isinstance(given, str) and key in ("metrics", "weighted_metrics") else given


def _listed(key: str, given: Any) -> list[Any]:
    if isinstance(given, str):
        raise UsageError(f"{key} is a list: [{given!r}]")
    if given is None:
        return []
    return list(given) if isinstance(given, Iterable) else [given]


def _named(short: str, output: str) -> str:
    return f"{output}_{short}" if output else short


def _fresh(short: str, output: str, taken: set[str]) -> str:
    """Return a metric's name in histories; refuse one that is taken."""
    name = _named(short, output)
    if name in taken:
        raise UsageError(f"there are two metrics called {name!r}")
    if name.startswith("val_"):
        raise UsageError(
            f"a metric is called {name!r}, but histories give what begins with val_ to "
            "validation data; call it something else"
        )
    taken.add(name)
    return name


def _number(weight: Any) -> float:
    if isinstance(weight, bool) or not isinstance(weight, int | float | np.number):
        raise UsageError(f"a loss weight is a number, not {weight!r}")
    return float(weight)


def _weighted(what: str, value: Any, sample_weight: Any) -> Tensor:
    """Multiply a loss by the samples' weights `(batch,)`, or one per position `(batch, time)`."""
    value, weights = as_tensor(value), as_tensor(sample_weight)
    if value.ndim < 2 or weights.shape != value.shape[: weights.ndim]:
        value = per_sample(what, value)
        if weights.ndim == 2 and weights.shape[1] == 1:
            weights = ops.squeeze(weights, axis=1)
    if not value.ndim or weights.shape != value.shape[: weights.ndim]:
        raise ShapeError(
            f"{what} has shape {show(value.shape)}, and sample_weight {show(weights.shape)}; "
            "weights need one value of the loss per sample, (batch,)"
        )
    shape = (*weights.shape, *(1 for _ in value.shape[weights.ndim :]))
    return ops.multiply(value, ops.reshape(ops.cast(weights, value.dtype), shape))


def _increment(name: str, measure: metrics.Measure, batch: tuple[Any, Any, Any]) -> Tensor:
    added = _metric(measure).increment(*batch)
    if not isinstance(added, Tensor):
        raise UsageError(f"metric {name!r} gave {added!r:.60}; it has to compute with tensors")
    if any(isinstance(size, Dim) for size in added.shape):
        raise ShapeError(
            f"{line_of(added)}: metric {name!r} gave an increment of shape {show(added.shape)}; it "
            "is a sum over the batch, whose shape does not depend on the batch"
        )
    return added


def per_sample_metric(what: str, found: Any) -> Tensor:
    """Average a metric's result to one value per sample."""
    value = per_sample(what, found)
    refuse_scalar(what, value)
    return value


def per_sample(what: str, value: Any) -> Tensor:
    """Average a loss's or metric's result to one value per sample; leave a scalar unchanged."""
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


def probabilities(model: Layer, loss: Any) -> str:
    """Describe the mismatch of a loss that takes probabilities and a last layer that returns
    others.

    Only the activation of the model's last layer is considered.
    """
    row = None if loss is None else losses.row_of(loss)
    if row is None or not row.shares or getattr(loss, "options", {}).get("from_logits"):
        return ""
    last: Layer | None = model
    while last is not None and last.holds_layers:
        last = last.layers[-1] if last.layers else None
    function = getattr(last, "activation", None)
    wrong = next((name for name in _NO_PROBABILITIES if activations.TABLE[name] is function), None)
    if wrong is None:
        return ""
    name = (loss.function if isinstance(loss, losses.Loss) else loss).__name__
    return (
        f"the model's last layer is {wrong}, but the loss {name} takes probabilities: "
        f'add activation="softmax" to it, or use ar.nn.losses.{row.kind.__name__}(from_logits=True)'
    )
