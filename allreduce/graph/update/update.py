"""From a loss to changed variables: the base of optimizers."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from allreduce import _native
from allreduce.devices.names import DeviceName
from allreduce.errors import UnsupportedError, UsageError
from allreduce.events import current_rank, logger
from allreduce.graph.autodiff.gradient import backward
from allreduce.graph.core.node import Node
from allreduce.graph.core.scope import users_line
from allreduce.graph.core.spec import Dim, show
from allreduce.graph.core.tensor import Tensor, TracedTensor
from allreduce.graph.ops import functions
from allreduce.graph.placement.device_map import DeviceMap
from allreduce.graph.trace.dispatch import as_tensor
from allreduce.graph.trace.rank_digest import RankDigest
from allreduce.graph.trace.replica import Replica
from allreduce.graph.trace.trace import Trace, current_trace
from allreduce.graph.trace.variable import Variable
from allreduce.keywords import explain

# float16 counts samples up to 2048 only, by which the sums of gradients are divided.
_CHANGED = ("float32", "float64")
_LINEAR = ("add", "subtract", "negative", "cast")
_warned: set[str] = set()  # the lines whose reduced losses were warned of


# From a rule, or a group's view of one, and the rule's class to an update called as the rule's is.
Updates = Callable[[Any, type], Callable[..., None]]


@dataclass(frozen=True, slots=True)
class NativeUpdate:
    """A rule's update of one range of an arena, for where gradients are reduced.

    Attributes:
        update: Changes any part of it; the arrays are the caller's to keep.
        prepare: Gives it the rule's present settings, and the number of the step, from 1.
    """

    update: _native.RuleUpdate
    prepare: Callable[[int], None]


class UpdateRule(ABC):
    """An optimizer, as the executor sees it.

    Attributes:
        iterations: The number of steps done so far.
        slots: The names of the arrays that `update` keeps for each parameter.
        clip_norm: The largest norm of all mean gradients together; None for any.
        gradient_accumulation: The number of steps, each with a micro-batch, that make an update.
    """

    iterations: int
    slots: tuple[str, ...] = ()
    clip_norm: float | None = None
    gradient_accumulation: int = 1

    @property
    def all_slots(self) -> tuple[str, ...]:
        """The names of all arrays kept for each parameter."""
        return self.slots

    @property
    def average_slots(self) -> tuple[str, ...]:
        """The slots that average the parameters; copies of them where a loaded state has none."""
        return ()

    @property
    def is_elementwise(self) -> bool:
        """Whether any range may be updated separately, as in sharded updates."""
        return True

    @property
    def fixed_options(self) -> dict[str, Any]:
        """The options that steps are traced for: they stay as they are from the first step on."""
        return {"clip_norm": self.clip_norm is not None}

    @property
    def updates_at_once(self) -> bool:
        """Whether one call of `update` or `native` changes a bucket."""
        return True

    @abstractmethod
    def get_config(self) -> dict[str, Any]:
        """Return the settings as plain data; ranks compare them in every step."""

    @abstractmethod
    def update(
        self,
        parameters: np.ndarray,
        gradients: np.ndarray,
        slots: Mapping[str, np.ndarray],
        count: np.ndarray,
        step: int,
    ) -> None:
        """Update one bucket in place, in one pass over its memory.

        Args:
            parameters: A contiguous range of them, `(n,)`.
            gradients: Their gradients' sum over all replicas, `(n,)`.
            slots: For each of `slots` the same range of it, `(n,)`.
            count: The number of samples to divide the gradients by, `(1,)`.
            step: The number of this update; the first is 1.
        """

    def check(self, step: int) -> None:  # noqa: B027  # most rules have nothing to check
        """Check settings that depend on the update's number, before the step begins.

        Args:
            step: The number of the next update; the first is 1.
        """

    def bucket_update(
        self,
        spans: Sequence[tuple[str, slice]],  # noqa: ARG002  # of rules that tell variables apart
        updates: Updates | None = None,
    ) -> Callable[..., None]:
        """Return a function that updates one bucket, called as `update` is.

        Args:
            spans: Each variable's path and its range of the bucket.
            updates: Finds the update of a kind of device; None for `update` itself.
        """
        return self.update if updates is None else updates(self, type(self))

    def native(
        self,
        header: np.ndarray,  # noqa: ARG002  # for optimizers that have one
        slots: Mapping[str, np.ndarray],  # noqa: ARG002
    ) -> NativeUpdate | None:
        """Return the same update for native code, if there is one.

        With it, and slots, every replica of a host updates but its own slice of a large bucket. It
        is not used where `update` has been replaced further down, by a subclass or on the instance.

        Args:
            header: Its first element is the number of samples to divide the gradients by.
            slots: For each of `slots` the bucket's range of it, `(n,)`; to be changed in place.
        """
        return None


class LocalReplicas(Protocol):
    """The replicas of this process, as compiling a step needs them."""

    @property
    def devices(self) -> Sequence[DeviceName]: ...
    @property
    def places(self) -> Sequence[DeviceMap]: ...
    @property
    def replicas(self) -> Sequence[Replica]: ...
    @property
    def num_replicas_in_sync(self) -> int: ...
    @property
    def shared(self) -> weakref.WeakSet[Variable]: ...
    @property
    def rank_digest(self) -> RankDigest: ...

    def check_update(self, check: Callable[[], None]) -> None: ...
    def on_replicas(self, work: Callable[[int], Any]) -> list[Any]: ...


def minimize(
    rule: UpdateRule, loss: Any, variables: Sequence[Variable], weight: Any = None
) -> None:
    """Take one step down the gradient of the global mean of `loss`; works inside `ar.function`.

    Args:
        rule: The optimizer.
        loss: One value per sample, whose sum is divided by the global number of values; or a
            scalar, which counts as the mean over the replica's rows. Several replicas warn if it is
            computed otherwise.
        variables: The variables to train.
        weight: The weight of the replica's part instead, such as the number of unmasked tokens.

    Raises:
        UsageError: Outside of `ar.function`, or the variables cannot be changed so.
    """
    trace = _trace("minimize")
    _check(variables)
    loss = as_tensor(loss)
    if not np.issubdtype(loss.dtype, np.floating):
        raise UsageError(f"{users_line()}: the loss is {loss.dtype}; minimize needs a float")
    if weight is None:
        warn_reduced_loss(loss)
    if loss.ndim == 0:
        count = _weight(trace, weight)
        seed = functions.cast(count, loss.dtype)
    else:
        count = functions.size(loss) if weight is None else as_tensor(weight)
        seed = as_tensor(np.ones((), loss.dtype))
    # The count is recorded before the gradients, because it travels with the first of them.
    counts = _counts(variables, count)
    _aggregate(trace, rule, backward(loss, variables, seed), variables, counts)


def warn_reduced_loss(loss: Tensor) -> None:
    """Warn of a loss of several replicas that is reduced over their rows, and not by a mean.

    The results of a step with such a loss depend on the number of replicas. Warns once for each
    line that makes such a loss, on rank 0; a step of one replica is not warned of.
    """
    trace = current_trace()
    if not isinstance(loss, TracedTensor) or trace is None or loss.trace is not trace:
        return  # a constant, or refused elsewhere
    if trace.replicas == 1 or any(isinstance(size, Dim) for size in loss.shape):
        return
    if not (trace.has_batch if loss.ndim else _varies(trace, loss.id)):
        return
    line = trace.nodes[loss.id].source
    if line in _warned or current_rank():
        return
    _warned.add(line)
    shown = "a scalar, which counts as the mean over that replica's rows but is computed otherwise"
    if loss.ndim:
        shown = f"of shape {show(loss.shape)}, which counts the same for any number of rows"
    logger.warning(
        "%s: the loss of each replica is %s. So results may depend on the number of replicas "
        "(here %d). Return one value per sample, (batch,), without the last sum or mean; or, in a "
        "step of your own, pass the number that a mean was divided by: minimize(loss, variables, "
        "weight=…)",
        line,
        shown,
        trace.replicas,
    )


def _varies(trace: Trace, scalar: int) -> bool:
    """Return whether a value may be other than a mean over rows, or a linear function of such."""
    nodes, of_samples, seen = trace.nodes, set[int](), set[int]()
    for node in nodes[: scalar + 1]:
        if node.op == "placeholder" or any(each in of_samples for each in node.inputs):
            of_samples.add(node.id)
    left = [scalar]
    while left:
        node = nodes[left.pop()]
        if node.id in seen:
            continue
        seen.add(node.id)
        varying = [each for each in node.inputs if each in of_samples]
        if node.op == "mean" and varying:
            rows = nodes[varying[0]].spec.shape
            if trace.has_batch and not any(isinstance(size, Dim) for size in rows):
                return True
        elif node.op in _LINEAR or (len(varying) == 1 and _is_scaled(node, varying[0])):
            left += varying
        elif node.id in of_samples:
            return True
    return False


def _is_scaled(node: Node, value: int) -> bool:
    return node.op == "multiply" or (node.op == "divide" and node.inputs[0] == value)


@explain()
def gradients(loss: Any, variables: Sequence[Any]) -> list[Tensor]:
    """Differentiate this replica's mean of `loss`; works inside `ar.function`.

    Returns:
        One tensor per variable, of its shape. They are local: `Optimizer.apply` aggregates.
    """
    _trace("gradients")
    loss = as_tensor(loss)
    mean = loss if loss.ndim == 0 else functions.mean(loss)
    return backward(mean, variables, as_tensor(np.ones((), loss.dtype)))


def apply_gradients(
    rule: UpdateRule, grads: Sequence[Any], variables: Sequence[Variable], weight: Any = None
) -> None:
    """Take one step along the mean of all replicas' gradients, each weighted by its rows.

    Args:
        rule: The optimizer.
        grads: This replica's means, one per variable and of its shape.
        variables: The variables to change.
        weight: The replica's weight instead of its number of rows.

    Raises:
        UsageError: Outside of `ar.function`, or gradients and variables do not fit.
    """
    trace = _trace("apply")
    _check(variables)
    tensors = [as_tensor(each) for each in grads]
    if len(tensors) != len(variables):
        raise UsageError(f"{len(tensors)} gradients were given for {len(variables)} variables")
    for tensor, variable in zip(tensors, variables, strict=True):
        if tensor.shape != variable.spec.shape:
            raise UsageError(
                f"{users_line()}: the gradient of variable {variable.name!r} has shape "
                f"{show(tensor.shape)}; expected the variable's, {show(variable.spec.shape)}"
            )
    count = _weight(trace, weight)
    sums = [tensor * functions.cast(count, tensor.dtype) for tensor in tensors]
    _aggregate(trace, rule, sums, variables, _counts(variables, count))


def _trace(what: str) -> Trace:
    trace = current_trace()
    if trace is None:
        raise UsageError(
            f"{users_line()}: {what} works inside ar.function; decorate the step with @ar.function"
        )
    return trace


def _weight(trace: Trace, weight: Any) -> Tensor:
    if weight is not None:
        return as_tensor(weight)
    return trace.runtime("rows") if trace.has_batch else as_tensor(np.ones((), np.int64))


def _aggregate(
    trace: Trace,
    rule: UpdateRule,
    sums: Sequence[Tensor],
    variables: Sequence[Variable],
    counts: Mapping[np.dtype[Any], Tensor],
) -> None:
    # Variables of one device and dtype are updated together, on that device.
    groups: dict[tuple[np.dtype[Any], DeviceName], list[int]] = {}
    for i, variable in enumerate(variables):
        groups.setdefault((variable.dtype, variable.place), []).append(i)
    if rule.clip_norm is not None and len(groups) > 1:
        kinds = ", ".join(f"{dtype} on {place}" for dtype, place in groups)
        raise UnsupportedError(
            f"{users_line()}: clip_norm needs all variables in one arena, but these lie in "
            f"{len(groups)}: {kinds}; give them one dtype and device, or use clip_value"
        )
    for (dtype, place), chosen in groups.items():
        # In the order in which gradients become ready, as they were recorded: that is the same on
        # all ranks, whatever passes make of the values that a rank has for itself.
        chosen.sort(key=lambda i: _recorded_at(sums[i]))
        mine = tuple(variables[i] for i in chosen)
        inputs = [counts[dtype], *(sums[i] for i in chosen)]
        recorded = [each for each in inputs if isinstance(each, TracedTensor)]
        trace.effect("apply_gradients", recorded, {"rule": rule, "variables": mine}, mine, place)


def _recorded_at(tensor: Tensor) -> int:
    return tensor.id if isinstance(tensor, TracedTensor) else -1


def _counts(variables: Sequence[Variable], count: Tensor) -> dict[np.dtype[Any], Tensor]:
    """Cast the count to each of the variables' dtypes."""
    if count.ndim:
        raise UsageError(f"{users_line()}: weight is one number, not of shape {show(count.shape)}")
    return {dtype: functions.cast(count, dtype) for dtype in (v.dtype for v in variables)}


def _check(variables: Sequence[Variable]) -> None:
    if not isinstance(variables, list | tuple):
        raise UsageError(
            f"{users_line()}: expected a list of variables, got {type(variables).__name__}; a "
            "model's are model.trainable_variables"
        )
    if not variables:
        raise UsageError(f"{users_line()}: no variables were given; has the model been built?")
    seen: set[Variable] = set()
    for variable in variables:
        if not isinstance(variable, Variable):
            raise UsageError(f"{users_line()}: {variable!r} is not a variable")
        if variable in seen:
            raise UsageError(f"{users_line()}: variable {variable.name!r} is given twice")
        if variable.dtype.name not in _CHANGED:
            raise UsageError(
                f"{users_line()}: variable {variable.name!r} is {variable.dtype}; optimizers "
                f"change variables of {' and '.join(_CHANGED)}: make it one, and use "
                "ar.ops.cast where the step needs another type"
            )
        seen.add(variable)
