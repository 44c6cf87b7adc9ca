"""Learning-rate schedules: the rate as a function of the number of updates done.

`ar.optim.SGD(ar.optim.schedules.CosineDecay(0.1, decay_steps=1000))`. The optimizer asks its
schedule on the host before each update, so that a step is never traced again. A schedule is
stateless: its arguments and the number of updates are saved with the optimizer.
"""

from __future__ import annotations

import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from allreduce.devices.integers import switch
from allreduce.errors import UsageError, unknown_name
from allreduce.keywords import Refusing
from allreduce.optim.checks import checked

Rate = Callable[[int], float]


class Schedule(Refusing, ABC):
    """A learning rate that depends on the number of updates done.

    A subclass keeps its constructor's arguments as attributes of the same names, so that it can be
    saved with an optimizer; or it has a `get_config` that returns them.
    """

    @abstractmethod
    def __call__(self, step: int) -> float:
        """Return the learning rate of the next update.

        Args:
            step: The number of updates done; 0 before the first one.
        """

    def get_config(self) -> dict[str, Any]:
        """Return the constructor's arguments, as plain data."""
        names = inspect.signature(type(self)).parameters
        return {name: describe(getattr(self, name), 0) for name in names}

    def __repr__(self) -> str:
        arguments = ", ".join(f"{name}={value!r}" for name, value in self.get_config().items())
        return f"{type(self).__name__}({arguments})"


class ExponentialDecay(Schedule):
    """`initial * decay_rate ** (step / decay_steps)`.

    Args:
        initial_learning_rate: The rate of the first update.
        decay_steps: After so many updates the rate has been multiplied by `decay_rate` once.
        decay_rate: The factor.
        staircase: Whether the exponent is rounded down, so that the rate falls in steps.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        decay_rate: float,
        staircase: bool = False,
    ) -> None:
        self.initial_learning_rate = _rate("initial_learning_rate", initial_learning_rate)
        self.decay_steps = _steps("decay_steps", decay_steps)
        self.decay_rate = _rate("decay_rate", decay_rate)
        self.staircase = switch("staircase", staircase)

    def __call__(self, step: int) -> float:
        exponent = _units(step, self.decay_steps, self.staircase)
        return float(self.initial_learning_rate * self.decay_rate**exponent)


class InverseTimeDecay(Schedule):
    """`initial / (1 + decay_rate * step / decay_steps)`.

    Args:
        initial_learning_rate: The rate of the first update.
        decay_steps: The unit in which updates are counted.
        decay_rate: How much the divisor grows in each unit.
        staircase: Whether units are counted as whole ones, so that the rate falls in steps.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        decay_rate: float,
        staircase: bool = False,
    ) -> None:
        self.initial_learning_rate = _rate("initial_learning_rate", initial_learning_rate)
        self.decay_steps = _steps("decay_steps", decay_steps)
        self.decay_rate = _rate("decay_rate", decay_rate)
        self.staircase = switch("staircase", staircase)

    def __call__(self, step: int) -> float:
        units = _units(step, self.decay_steps, self.staircase)
        return self.initial_learning_rate / (1 + self.decay_rate * units)


class PolynomialDecay(Schedule):
    """`(initial - end) * (1 - step / decay_steps) ** power + end`, and `end` after that.

    Args:
        initial_learning_rate: The rate of the first update.
        decay_steps: How many updates the decay takes.
        end_learning_rate: The rate after it.
        power: The exponent; 1 decays linearly.
        cycle: Whether the decay begins anew, over `decay_steps` more each time, instead of ending.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        end_learning_rate: float = 0.0001,
        power: float = 1.0,
        cycle: bool = False,
    ) -> None:
        self.initial_learning_rate = _rate("initial_learning_rate", initial_learning_rate)
        self.decay_steps = _steps("decay_steps", decay_steps)
        self.end_learning_rate = _rate("end_learning_rate", end_learning_rate)
        self.power = _rate("power", power)
        self.cycle = switch("cycle", cycle)

    def __call__(self, step: int) -> float:
        total = self.decay_steps * (max(1, math.ceil(step / self.decay_steps)) if self.cycle else 1)
        left = 1 - min(step, total) / total
        span = self.initial_learning_rate - self.end_learning_rate
        return float(span * left**self.power) + self.end_learning_rate


class PiecewiseConstantDecay(Schedule):
    """`values[0]` up to and at `boundaries[0]`, then `values[1]`, and so on.

    Args:
        boundaries: Numbers of updates, increasing.
        values: Rates, one more than boundaries.
    """

    def __init__(self, boundaries: Sequence[float], values: Sequence[float]) -> None:
        for name, given in (("boundaries", boundaries), ("values", values)):
            if not isinstance(given, Sequence | np.ndarray):
                raise UsageError(f"{name} is a list of numbers, not {given!r}")
        self.boundaries = [checked("a boundary", each, low=-math.inf) for each in boundaries]
        self.values = [_rate("a value", value) for value in values]
        increases = sorted(set(self.boundaries)) == self.boundaries
        if len(boundaries) != len(values) - 1 or not increases:
            raise UsageError(
                "PiecewiseConstantDecay takes increasing boundaries and one more value than these, "
                f"not boundaries={boundaries!r} and values={values!r}"
            )

    def __call__(self, step: int) -> float:
        return self.values[sum(step > boundary for boundary in self.boundaries)]


class CosineDecay(Schedule):
    """Half a cosine from the initial rate to `alpha` times it, with a linear warm-up before it.

    Source: Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts (ICLR 2017),
    equation 5.

    Args:
        initial_learning_rate: The rate of the first update.
        decay_steps: How many updates the decay takes, after the warm-up.
        alpha: The last rate, as a fraction of the highest one.
        warmup_target: The rate at the end of the warm-up; None for no warm-up.
        warmup_steps: How many updates the warm-up takes.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        decay_steps: float,
        alpha: float = 0.0,
        warmup_target: float | None = None,
        warmup_steps: int = 0,
    ) -> None:
        self.initial_learning_rate = _rate("initial_learning_rate", initial_learning_rate)
        self.decay_steps = _steps("decay_steps", decay_steps)
        self.alpha = _rate("alpha", alpha)
        self.warmup_target = None
        if warmup_target is not None:
            self.warmup_target = _rate("warmup_target", warmup_target)
        self.warmup_steps = int(checked("warmup_steps", warmup_steps, low=0))

    def __call__(self, step: int) -> float:
        first = self.initial_learning_rate
        if self.warmup_target is None:
            return first * self._fraction(step)
        if step < self.warmup_steps:
            return first + (self.warmup_target - first) * step / self.warmup_steps
        return self.warmup_target * self._fraction(step - self.warmup_steps)

    def _fraction(self, step: int) -> float:
        return _half_cosine(min(step, self.decay_steps) / self.decay_steps, self.alpha)


class CosineDecayRestarts(Schedule):
    """Half cosines, one after the other, each from its initial rate to `alpha` times the first one.

    Source: Loshchilov and Hutter, SGDR: stochastic gradient descent with warm restarts (ICLR 2017),
    section 3.

    Args:
        initial_learning_rate: The rate of the first update.
        first_decay_steps: How many updates the first period takes.
        t_mul: How much longer each period is than the one before; 1 or more.
        m_mul: The factor between the initial rates of two periods.
        alpha: The last rate, as a fraction of the first one.
    """

    def __init__(
        self,
        initial_learning_rate: float,
        first_decay_steps: float,
        t_mul: float = 2.0,
        m_mul: float = 1.0,
        alpha: float = 0.0,
    ) -> None:
        self.initial_learning_rate = _rate("initial_learning_rate", initial_learning_rate)
        self.first_decay_steps = _steps("first_decay_steps", first_decay_steps)
        self.t_mul = checked("t_mul", t_mul, low=1.0)
        self.m_mul = _rate("m_mul", m_mul)
        self.alpha = _rate("alpha", alpha)

    def __call__(self, step: int) -> float:
        length, period, passed = self.first_decay_steps, 0, float(step)
        if self.t_mul == 1:
            period, passed = int(passed // length), passed % length
        while passed >= length:
            passed, length, period = passed - length, length * self.t_mul, period + 1
        return self.initial_learning_rate * _half_cosine(
            passed / length, self.alpha, self.m_mul**period
        )


class OneCycle(Schedule):
    """Half a cosine up to the highest rate, and half a cosine down to nearly nothing.

    Source: Smith and Topin, Super-convergence (2018), in the form that PyTorch's OneCycleLR has.

    Args:
        max_learning_rate: The highest rate.
        total_steps: How many updates the cycle takes; the rate stays at its end after that.
        pct_start: The fraction of them in which the rate rises.
        div_factor: The first rate is the highest one divided by this.
        final_div_factor: The last rate is the first one divided by this.
    """

    def __init__(
        self,
        max_learning_rate: float,
        total_steps: int,
        pct_start: float = 0.3,
        div_factor: float = 25.0,
        final_div_factor: float = 1e4,
    ) -> None:
        self.max_learning_rate = _rate("max_learning_rate", max_learning_rate)
        self.total_steps = int(checked("total_steps", total_steps, low=2))
        self.pct_start = checked("pct_start", pct_start, low=0.0, high=1.0, above=True)
        self.div_factor = _steps("div_factor", div_factor)
        self.final_div_factor = _steps("final_div_factor", final_div_factor)

    def __call__(self, step: int) -> float:
        top, first = self.max_learning_rate, self.max_learning_rate / self.div_factor
        peak, end = self.pct_start * self.total_steps - 1, self.total_steps - 1
        if step <= peak:
            return top + (first - top) * _half_cosine(step / peak if peak else 1.0)
        last = first / self.final_div_factor
        return last + (top - last) * _half_cosine((min(step, end) - peak) / (end - peak))


class Warmup(Schedule):
    """A linear warm-up to the first rate of another schedule, which then begins.

    Args:
        learning_rate: The schedule, or a constant rate.
        warmup_steps: How many updates the warm-up takes.
        initial_learning_rate: The rate of the first update.
    """

    def __init__(
        self, learning_rate: Any, warmup_steps: int, initial_learning_rate: float = 0.0
    ) -> None:
        self.learning_rate = get(learning_rate)
        self.warmup_steps = int(checked("warmup_steps", warmup_steps, low=0))
        self.initial_learning_rate = _rate("initial_learning_rate", initial_learning_rate)

    def __call__(self, step: int) -> float:
        if step >= self.warmup_steps:
            return _value(self.learning_rate, step - self.warmup_steps)
        first, target = self.initial_learning_rate, _value(self.learning_rate, 0)
        return first + (target - first) * step / self.warmup_steps


class LinearScaling(Schedule):
    """A rate for one replica, times the number of replicas, with a warm-up from the former.

    For a global batch that grows with the number of replicas.

    Source: Goyal et al., Accurate, large minibatch SGD (2017), sections 2.1 and 2.2.

    Args:
        learning_rate: The rate for one replica: a constant, or a schedule.
        replicas: How many there are: `strategy.num_replicas_in_sync`.
        warmup_steps: How many updates it takes from a factor of 1 to one of `replicas`.
    """

    def __init__(self, learning_rate: Any, replicas: int, warmup_steps: int = 0) -> None:
        self.learning_rate = get(learning_rate)
        self.replicas = int(checked("replicas", replicas, low=1))
        self.warmup_steps = int(checked("warmup_steps", warmup_steps, low=0))

    def __call__(self, step: int) -> float:
        warm = 1.0 if step >= self.warmup_steps else step / self.warmup_steps
        return _value(self.learning_rate, step) * (1 + (self.replicas - 1) * warm)


_TABLE: Mapping[str, type[Schedule]] = {
    kind.__name__: kind
    for kind in (
        *(CosineDecay, CosineDecayRestarts, ExponentialDecay, InverseTimeDecay, LinearScaling),
        *(OneCycle, PiecewiseConstantDecay, PolynomialDecay, Warmup),
    )
}


def get(identifier: Any, custom: Mapping[str, Any] | None = None) -> float | Rate:
    """Return a rate or schedule of a number, a schedule, a function or its description.

    Args:
        identifier: A rate, a `Schedule`, any function of the number of updates done, or the
            `{"schedule": name, "config": {...}}` that `describe` returned.
        custom: One's own schedules by name.

    Raises:
        UsageError: It is none of these.
    """
    if isinstance(identifier, type):
        raise UsageError(f"learning_rate is a class; make a schedule: {identifier.__name__}(…)")
    if callable(identifier):
        rate: Rate = identifier
        return rate
    if _is_described(identifier):
        name, known = str(identifier["schedule"]), {**_TABLE, **(custom or {})}
        if name not in known:
            hint = f"pass its class as custom_objects={{{name!r}: …}}"
            raise UsageError(f"{unknown_name('schedule', name, _TABLE)}; {hint}")
        config = identifier.get("config", {})
        # Its arguments may be schedules, too; `custom` has the classes that users have defined.
        inner = {key: get(config[key], custom) for key in config if _is_described(config[key])}
        made: Rate = known[name](**{**config, **inner})
        return made
    return checked("learning_rate", identifier, low=0.0)


def at(rate: float | Rate, step: int) -> float:
    """Return the learning rate of an update.

    Args:
        rate: A constant or a schedule.
        step: The number of updates done before it.

    Raises:
        UsageError: The schedule gives no finite number, or a negative one.
        Exception: The schedule raised it; a note has the update's number.
    """
    if not callable(rate):
        return rate
    try:
        value = rate(step)
    except Exception as error:
        error.add_note(f"{_named(rate)}({step}), the learning rate of update {step + 1}, raised it")
        raise
    try:
        return checked("learning_rate", value, low=0.0)
    except UsageError:
        raise UsageError(
            f"the learning rate of update {step + 1} is {value!r}, as {_named(rate)}({step}) "
            "returned it; a schedule returns a finite number that is not negative"
        ) from None


def _value(rate: float | Rate, step: int) -> float:
    """Return an inner schedule's rate; the outer one's is checked, and knows the update."""
    return rate(step) if callable(rate) else rate


def describe(rate: float | Rate, step: int) -> Any:
    """Describe a rate as plain data; a function by its name and its rate now.

    Args:
        rate: A constant or a schedule.
        step: The number of updates done.
    """
    if not callable(rate):
        return rate
    if isinstance(rate, Schedule):
        return {"schedule": type(rate).__name__, "config": rate.get_config()}
    return {"function": _named(rate), "rate": at(rate, step)}


def function_in(described: Any) -> str | None:
    """Find the name of a function in what `describe` returned; nothing can make that again."""
    if not isinstance(described, Mapping):
        return None
    if set(described) == {"function", "rate"}:
        return str(described["function"])
    if not _is_described(described):
        return None
    found = (function_in(each) for each in described.get("config", {}).values())
    return next((name for name in found if name is not None), None)


def _is_described(value: Any) -> bool:
    return isinstance(value, Mapping) and "schedule" in value


def _named(rate: Rate) -> str:
    return str(getattr(rate, "__qualname__", type(rate).__name__))


def _half_cosine(fraction: float, alpha: float = 0.0, factor: float = 1.0) -> float:
    return (1 - alpha) * factor * 0.5 * (1 + math.cos(math.pi * fraction)) + alpha


def _units(step: int, decay_steps: float, staircase: bool) -> float:
    """Return the time since the first update, in units of `decay_steps`."""
    units = step / decay_steps
    return math.floor(units) if staircase else units


def _rate(name: str, value: float) -> float:
    return checked(name, value, low=0.0)


def _steps(name: str, value: float) -> float:
    return checked(name, value, low=0.0, above=True)
