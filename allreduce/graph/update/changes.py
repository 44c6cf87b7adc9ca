"""Check the variables that a step changes, while tracing or when an eager step changes them."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import Any

from allreduce.errors import UsageError
from allreduce.graph.core.node import Node
from allreduce.graph.trace.variable import Variable
from allreduce.graph.update.host import Host


def name_of(fn: Callable[..., Any]) -> str:
    """Return a function's name."""
    return getattr(fn, "__qualname__", repr(fn))


def check_owner(host: Host, variables: Iterable[Variable]) -> None:
    """Raise an error if a variable does not belong to the replicas that run the step."""
    for variable in variables:
        owner: object = variable.replicator
        if owner is not host:
            another = "another " if repr(owner) == repr(host) else ""
            raise UsageError(
                f"variable {variable.name!r} was made for {owner!r}, but the step "
                f"runs on {another}{host!r}; make the model and the optimizer inside `with "
                "strategy.scope():` and run its steps with the same strategy"
            )


def check_equal(assign: Node, varying: Container[int]) -> None:
    """Raise an error if an assigned value differs between replicas.

    Args:
        assign: The assignment.
        varying: The nodes whose values differ between replicas.
    """
    if assign.inputs[0] in varying:
        raise UsageError(
            f"{assign.source}: variable {assign.attrs['variable'].name!r} would be assigned a "
            "value that depends on the replica's own samples, so that replicas would differ; "
            "return the value, reduce it with strategy.reduce, and assign the result"
        )


def check_once(update: Node, changed: set[Variable]) -> None:
    """Raise an error if an update changes a variable again; add its variables to `changed`."""
    again = changed.intersection(update.attrs["variables"])
    if again:
        raise UsageError(
            f"{update.source}: variable {min(v.name for v in again)!r} is updated twice in one "
            "step; add the losses up and minimize their sum, or make two steps"
        )
    changed.update(update.attrs["variables"])


def needs_all(fn: Callable[..., Any], what: str, replicas: int) -> UsageError:
    """Return the error for a step of several replicas that was called on one of them."""
    return UsageError(
        f"{name_of(fn)} {what} of {replicas} replicas; call it through strategy.run(...), so that "
        "all of them take part"
    )
