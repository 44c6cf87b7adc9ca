"""The scopes around the user's code on this thread: devices, parts of a model, and its line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import reduce

from allreduce.devices.names import DeviceName
from allreduce.graph.core.node import Node
from allreduce.graph.core.source_location import started_at
from allreduce.graph.core.source_location import users_line as users_line
from allreduce.keywords import explain


@dataclass(frozen=True, slots=True)
class SameDeviceAs:
    """A scope that places operators on the device of a node of one trace."""

    trace: int  # its id
    node: int


Chooser = Callable[[Node], "str | DeviceName | None"]
Scope = DeviceName | SameDeviceAs | Chooser


class _Surroundings(threading.local):
    scopes: tuple[Scope, ...] = ()  # outermost first
    part: str = ""  # of the model: "sequential/0"


_here = _Surroundings()


def surroundings() -> tuple[Scope, ...]:
    """Return the scopes around the caller, outermost first; equal ones place equally."""
    return _here.scopes


def current_part() -> str:
    """Return the part of the model that is being called, "sequential/0"; empty outside."""
    return _here.part


def choose(node: Node, trace: object = None) -> Node:
    """Set a node's requested device, or the node to share a device with, from the scopes.

    Inner scopes win. Parts of a name that they omit are taken from the next outer scope, up to the
    next colocation.
    """
    asked: DeviceName | None = None
    for scope in reversed(_here.scopes):
        if isinstance(scope, SameDeviceAs):
            if asked is None and scope.trace == id(trace):
                return replace(node, beside=scope.node)
            break
        chosen = scope if isinstance(scope, DeviceName) else scope(node)
        if chosen is not None:
            name = DeviceName.parse(chosen)
            asked = name if asked is None else asked.merge(name)
    return node if asked is None else replace(node, device=asked)


def asked_for() -> DeviceName | None:
    """Return the device that the scopes around the caller name; None if they name none."""
    named = [scope for scope in _here.scopes if isinstance(scope, DeviceName)]
    if not named or len(named) < len(_here.scopes):  # functions may, and values do, decide later
        return None
    return reduce(lambda outer, inner: inner.merge(outer), named)


@explain()
def device(name: str | DeviceName | Chooser) -> AbstractContextManager[None]:
    """Place the operators that the block calls on a device.

    Scopes nest: parts of the name that an inner scope omits are taken from the outer one.

    Args:
        name: A full or partial device name, `"/job:worker/task:1/GPU:0"` or `"CPU:1"`; or a
            function that takes an operation (`.op`, `.spec`, `.attrs`; a variable's `.op` is
            "variable") and returns a name, or None for any device.

    Raises:
        DeviceError: The name is malformed, or is neither a string nor a function.
    """
    if not isinstance(name, str | DeviceName) and callable(name):
        return within(name)
    return within(DeviceName.parse(name))


@contextmanager
def within(*scopes: Scope) -> Iterator[None]:
    """Enter scopes for the block, the innermost last."""
    outer = _here.scopes
    _here.scopes = (*outer, *scopes)
    try:
        yield
    finally:
        _here.scopes = outer


@contextmanager
def part(name: str) -> Iterator[None]:
    """Set the part of the model that the block calls."""
    outer, _here.part = _here.part, name
    try:
        yield
    finally:
        _here.part = outer


def take_along() -> Callable[[], None]:
    """Return a context that gives another thread the scopes of this one."""
    scopes, line = _here.scopes, users_line()

    def settle() -> None:
        _here.scopes = scopes
        started_at(line)

    return settle
