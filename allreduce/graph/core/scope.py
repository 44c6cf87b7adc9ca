"""What surrounds the user's code on this thread: where its operators go, and the line that runs."""

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


@dataclass(frozen=True, slots=True)
class Beside:
    """A scope that places what it holds where a node of one trace is."""

    trace: int  # its id
    node: int


Chooser = Callable[[Node], "str | DeviceName | None"]
Scope = DeviceName | Beside | Chooser


class _Surroundings(threading.local):
    scopes: tuple[Scope, ...] = ()  # outermost first
    part: str = ""  # of the model: "sequential/0"


_here = _Surroundings()


def surroundings() -> tuple[Scope, ...]:
    """Return the scopes around the caller, the outermost first; equal ones place alike."""
    return _here.scopes


def current_part() -> str:
    """Return which part of a model is being called, "sequential/0"; empty outside of any."""
    return _here.part


def choose(node: Node, trace: object = None) -> Node:
    """Write into a node what the scopes around the caller ask for: a device, or a node's beside.

    Inner scopes win. A part of a name that they leave open is taken from the next outer one, as far
    as the next colocation.
    """
    asked: DeviceName | None = None
    for scope in reversed(_here.scopes):
        if isinstance(scope, Beside):
            if asked is None and scope.trace == id(trace):
                return replace(node, beside=scope.node)
            break
        said = scope if isinstance(scope, DeviceName) else scope(node)
        if said is not None:
            name = DeviceName.parse(said)
            asked = name if asked is None else asked.merge(name)
    return node if asked is None else replace(node, device=asked)


def asked_for() -> DeviceName | None:
    """Return the device that the scopes around the caller name; None where they leave it open."""
    named = [scope for scope in _here.scopes if isinstance(scope, DeviceName)]
    if not named or len(named) < len(_here.scopes):  # functions may, and values do, decide later
        return None
    return reduce(lambda outer, inner: inner.merge(outer), named)


def device(name: str | DeviceName | Chooser) -> AbstractContextManager[None]:
    """Place the operators that the block calls on a device.

    Scopes nest: a part of the name that an inner scope leaves out is taken from the outer one.

    Args:
        name: A device name in full or in part, `"/job:worker/task:1/GPU:0"` or `"CPU:1"`; or a
            function that is given each operation (`.op`, `.spec`, `.attrs`; a variable's `.op` is
            "variable") and returns a name, or None where it does not care.

    Raises:
        DeviceError: The name is malformed, or neither text nor a function.
    """
    if not isinstance(name, str | DeviceName) and callable(name):
        return within(name)
    return within(DeviceName.parse(name))


@contextmanager
def within(*scopes: Scope) -> Iterator[None]:
    """Put scopes around the block, the innermost last."""
    outer = _here.scopes
    _here.scopes = (*outer, *scopes)
    try:
        yield
    finally:
        _here.scopes = outer


@contextmanager
def part(name: str) -> Iterator[None]:
    """Say which part of a model the block calls."""
    outer, _here.part = _here.part, name
    try:
        yield
    finally:
        _here.part = outer


def take_along() -> Callable[[], None]:
    """Return what gives a thread of ours the surroundings of this one."""
    scopes, line = _here.scopes, users_line()

    def settle() -> None:
        _here.scopes = scopes
        started_at(line)

    return settle
