"""Errors that end a step on one rank: the others get a line, and the traceback.

The communicator itself keeps one line, which is all that memory shared with a failing member has
room for; the traceback goes through the world's store.
"""

from __future__ import annotations

import time

import numpy as np

from allreduce import events
from allreduce.cluster.process import traces
from allreduce.comm import Communicator, begin_exchange, world
from allreduce.errors import AllreduceError, MismatchError

_NO_STEP = "no step"  # begins the purpose of an exchange by ranks that could not make one
_TOGETHER_SECONDS = 1.0  # in which ranks that fail alike come
_LOOK_SECONDS = 0.002
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
    if isinstance(error, MismatchError):
        told = any(_NO_STEP in call for call in error.calls)
    else:  # of a member that died, all are told without asking a leader
        told = error.finding is not None and error.finding.fault == "aborted"
    if not told:
        return
    try:
        error.add_note(world().store.get(_key(communicator), timeout=0.0).decode().rstrip())
    except AllreduceError as failure:  # the leader is gone, too
        events.logger.debug("no rank has told a traceback: %s", failure)


def all_alike(members: list[Communicator], error: Exception) -> bool:
    """Say whether all ranks have failed to make a step, by errors of one class, and can go on.

    If another rank makes a different call, that call ends with an error that names both.

    Args:
        members: This process's, of the communicator in which the others may wait.
        error: Why this rank has no step.
    """
    purpose = f"{_NO_STEP}: this rank raised {type(error).__name__}"
    limit = time.monotonic() + _TOGETHER_SECONDS
    try:
        works = [begin_exchange(each, purpose, np.zeros(1, np.int8)) for each in members]
        while not all(work.done() for work in works):
            if time.monotonic() > limit:
                return False
            time.sleep(_LOOK_SECONDS)
    except AllreduceError:
        return False
    return True


def _key(communicator: Communicator) -> str:
    return f"traceback/{communicator.name}"
