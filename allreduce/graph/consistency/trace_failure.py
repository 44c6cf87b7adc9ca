"""Report an error that ends a step on one rank to the other ranks, with its traceback.

The communicator transmits one line, since the memory shared with a failing member holds no more.
The traceback goes through the world's store.
"""

from __future__ import annotations

import time

import numpy as np

from allreduce import events
from allreduce.cluster.process import traces
from allreduce.comm import Communicator, begin_exchange, world
from allreduce.errors import AllreduceError, MismatchError

_NO_STEP = "no step"  # starts the purpose of an exchange by ranks without a step
_TOGETHER_SECONDS = 1.0  # within which ranks with the same failure arrive
_POLL_SECONDS = 0.002
_RAISED = " raised "


def reason(who: str, error: BaseException) -> str:
    """Return the line that the communicator sends to the other members."""
    return f"{who}{_RAISED}{error!r}"


def publish_traceback(communicator: Communicator, who: str, error: BaseException) -> None:
    """Store an error's traceback for the other members, which read it when they get the line."""
    text = f"{who}{_RAISED.rstrip()}:\n{traces.text(error)}"
    try:
        world().store.set(_key(communicator), text.encode(errors="backslashreplace"))
    except AllreduceError as failure:  # the step's own error matters more
        events.logger.debug("the traceback was not sent to the other ranks: %s", failure)


def attach_traceback(communicator: Communicator, error: AllreduceError) -> None:
    """Add the failed member's traceback to an error, if a member has stored one."""
    if isinstance(error, MismatchError):
        stored = any(_NO_STEP in call for call in error.calls)
    else:  # a member that died has stored none
        stored = error.finding is not None and error.finding.fault == "aborted"
    if not stored:
        return
    try:
        error.add_note(world().store.get(_key(communicator), timeout=0.0).decode().rstrip())
    except AllreduceError as failure:  # the leader has ended, too
        events.logger.debug("no rank has stored a traceback: %s", failure)


def all_alike(members: list[Communicator], error: Exception) -> bool:
    """Return whether tracing failed on all ranks with errors of one class, so all can go on.

    If another rank makes a different call, that call raises an error that names both.

    Args:
        members: This process's members of the communicator in which the other ranks may wait.
        error: The error that ended this rank's trace.
    """
    purpose = f"{_NO_STEP}: this rank raised {type(error).__name__}"
    limit = time.monotonic() + _TOGETHER_SECONDS
    try:
        works = [begin_exchange(each, purpose, np.zeros(1, np.int8)) for each in members]
        while not all(work.done() for work in works):
            if time.monotonic() > limit:
                return False
            time.sleep(_POLL_SECONDS)
    except AllreduceError:
        return False
    return True


def _key(communicator: Communicator) -> str:
    return f"traceback/{communicator.name}"
