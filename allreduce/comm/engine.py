"""What goes on of all started calls of this process while it waits for none of them.

A member that makes a communicator waits for the others in the store and in sockets. These may first
have to complete a call that needs this member's share of it: the attendant's thread does it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from allreduce import _native
from allreduce.comm import attendant, living

# Each does what can be done of the calls of some kinds of transport, without blocking; the others'
# are added where they are imported.
drivers: list[Callable[[], object]] = [_native.progress]


def drive() -> None:
    """Do what can be done of all calls, as far as this thread may."""
    for driver in drivers:
        driver()


class _Meeting:
    """What the attendant goes on with until it is no more busy."""

    busy = True

    def attend(self) -> None:
        drive()


@contextlib.contextmanager
def going_on() -> Iterator[None]:
    """Have all calls of this process go on while this thread waits for something else."""
    meeting = _Meeting()
    try:
        if living.some():  # a process that joins has no calls yet
            attendant.attend(meeting)
        yield
    finally:
        meeting.busy = False
