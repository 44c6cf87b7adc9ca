"""Tracebacks of errors that ended a step on another rank, told through the world's store.

The communicator itself keeps a line of them, which is all that memory shared with a failing member
has room for.
"""

from __future__ import annotations

import traceback

from allreduce import events
from allreduce.comm import Communicator, world
from allreduce.errors import AllreduceError, PeerLostError


def tell(communicator: Communicator, who: str, error: BaseException) -> None:
    """Leave an error's traceback for the other members, who look for it when they are told."""
    text = f"{who} raised:\n{''.join(traceback.format_exception(error))}"
    try:
        world().store.set(_key(communicator), text.encode())
    except AllreduceError as failure:  # what ended the step is the one to be raised
        events.logger.debug("the other ranks are not told a traceback: %s", failure)


def add(communicator: Communicator, error: PeerLostError) -> None:
    """Add to an error the traceback of the member that raised, if one has left it."""
    try:
        error.add_note(world().store.get(_key(communicator), timeout=0.0).decode().rstrip())
    except AllreduceError as failure:  # a member died without raising, or the leader is gone
        events.logger.debug("no rank has told a traceback: %s", failure)


def _key(communicator: Communicator) -> str:
    return f"traceback/{communicator.name}"
