"""Tracebacks of errors that ended a step on another rank, told through the world's store.

The communicator itself keeps a line of them, which is all that memory shared with a failing member
has room for.
"""

from __future__ import annotations

from allreduce import events
from allreduce.cluster import traces
from allreduce.comm import Communicator, world
from allreduce.errors import AllreduceError, MismatchError

UNMADE = "no step"  # begins the purpose of an exchange by ranks that have none
_RAISED = " raised "


def reason(who: str, error: BaseException) -> str:
    """Give the line that the other members are told at once."""
    return f"{who}{_RAISED}{error!r}"


def tell(communicator: Communicator, who: str, error: BaseException) -> None:
    """Leave an error's traceback for the other members, who look for it when they are told."""
    text = f"{who}{_RAISED.rstrip()}:\n{traces.text(error)}"
    try:
        world().store.set(_key(communicator), text.encode(errors="backslashreplace"))
    except AllreduceError as failure:  # what ended the step is the one to be raised
        events.logger.debug("the other ranks are not told a traceback: %s", failure)


def add(communicator: Communicator, error: AllreduceError) -> None:
    """Add to an error the traceback of the member that raised, if it is that."""
    told = UNMADE if isinstance(error, MismatchError) else _RAISED
    if told not in str(error):  # of a member that died, all are told without asking a leader
        return
    try:
        error.add_note(world().store.get(_key(communicator), timeout=0.0).decode().rstrip())
    except AllreduceError as failure:  # the leader is gone, too
        events.logger.debug("no rank has told a traceback: %s", failure)


def _key(communicator: Communicator) -> str:
    return f"traceback/{communicator.name}"
