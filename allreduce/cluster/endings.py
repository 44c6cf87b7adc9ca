"""How a rank's end becomes the job's: an error ends all ranks, an interrupt ends them quietly.

MPI's finalise waits for all ranks, so that a rank which raised would hang there while the others
wait for it. Hence the hooks: an uncaught exception prints its traceback and aborts before that; at
exit an abnormal end is recognised and aborts too. In a notebook or an interactive session nothing
is hooked.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from allreduce.cluster import abrupt, exits, lineage, pmi, traces
from allreduce.cluster.base import World
from allreduce.cluster.store import VICTIM
from allreduce.errors import AllreduceError, PeerLostError

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
INTERRUPT = "an interrupt"  # what a program says to have ended by

# A death elsewhere shows here before its own traceback is out, and an interrupt of the whole job
# may show as a peer's death first: a victim waits this long before it reports.
_AFTER_YOU_SECONDS = 0.5
_LAST_SECONDS = 1.0  # for the interpreter to end by itself; the launcher gives longer


class Watch:
    """Ends the job when this rank ends abnormally.

    Args:
        rank: This process's rank.
        launched: Whether the launcher watches the ranks; it then reports interrupts.
        abort: Ends all ranks with an exit code, where the world has such a means (MPI). It returns
            where it has none any more.
        job: What the ranks of this host have in common before there is a world.
    """

    def __init__(
        self,
        rank: int,
        *,
        launched: bool = False,
        abort: Callable[[int], None] | None = None,
        job: str = "",
    ) -> None:
        self._rank, self._launched, self._abort, self._job = rank, launched, abort, job
        self._pid = os.getpid()
        self._who = f"rank {rank} (process {self._pid})"
        self._world: World | None = None
        self._hook = sys.excepthook
        self._hooked = not interactive()
        if self._hooked:
            sys.excepthook = self._on_exception
            exits.watch()
        # Runs before the rooms above leave in good order, and _close_worlds after them.
        atexit.register(self._at_exit)

    def over(self, world: World) -> World:
        """Watch over `world`: closing it ends the watch."""
        self._world = dataclasses.replace(world, farewell=self.end)
        _watches.append(self)
        lineage.mark(world.rank)
        return self._world

    def end(self) -> None:
        """Take the hooks away; harmless when they are gone."""
        if os.getpid() != self._pid:
            return
        if sys.excepthook == self._on_exception:
            sys.excepthook = self._hook
        if self._hooked:
            self._hooked = False
            exits.unwatch()
        if self._world is not None:
            lineage.unmark()
            self._world = None
            _watches.remove(self)
        atexit.unregister(self._at_exit)

    def _on_exception(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid:
            self._hook(kind, error, trace)
            return
        try:
            if isinstance(error, PeerLostError):
                if self._launched and self._world is not None:  # it waits for what is told here
                    self._world.store.tell(VICTIM, b"")
                time.sleep(_AFTER_YOU_SECONDS)
            if not issubclass(kind, KeyboardInterrupt):
                if isinstance(error, PeerLostError) and error.interrupted:
                    _say(str(error))
                elif self._hook in (sys.__excepthook__, traces.on_uncaught):
                    print(traces.text(error), end="", file=sys.stderr)
                else:
                    self._hook(kind, error, trace)
                self._say_victim(error)
                self._finish(1, _named(error))
                return
        except KeyboardInterrupt:
            pass  # then it was that, all along
        self._say_interrupted()
        self._finish(INTERRUPTED, INTERRUPT)

    def _say_interrupted(self) -> None:
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would end in a traceback
        if not self._launched:
            if self._is_first("interrupted"):  # rank 0 may be deaf: it is in MPI_Init
                _say(f"interrupted: {self._who}")
            _flush()
            time.sleep(_AFTER_YOU_SECONDS)  # ending frees the claim, and mpirun then kills the rest

    def _is_first(self, event: str) -> bool:
        """Say whether no other rank of this host, which still lives, has asked the same."""
        job = self._world.job if self._world is not None else self._job
        return _first_on_this_host(f"{event}.{job}")

    def _say_victim(self, error: BaseException | None) -> None:
        """Tell the launcher where this rank ends for want of another: that one has failed."""
        if not self._launched or self._world is None:
            return
        told = [] if error is None else traces.causes(error)
        if any(isinstance(each, PeerLostError) for each in told):
            with contextlib.suppress(AllreduceError):  # the leader is gone, too
                self._world.store.set(VICTIM, b"")

    def _end_job(self, code: int, reason: str) -> None:
        """End the job where that is in our hands; else the others learn of this rank's loss."""
        _flush()
        if self._abort is not None:
            time.sleep(pmi.REPORT_SECONDS)
            self._abort(code)
        self._abandon(reason)

    def _finish(self, code: int, reason: str) -> None:
        """End the job, and this process."""
        self._end_job(code, reason)
        last = threading.Timer(_LAST_SECONDS, _exit_now, (code,))
        last.daemon = True
        last.start()

    def _at_exit(self) -> None:
        code, reason = self.ending()
        if not code:
            return
        _flush()
        self._say_victim(exits.ending())
        self._abandon(reason)
        if self._abort is not None:
            if exits.ending() is not None and self._is_first("exit"):  # no traceback tells it
                _say(f"{self._who} ends with exit code {code}, and all with it")
            time.sleep(pmi.REPORT_SECONDS)
            self._abort(code)

    def ending(self) -> tuple[int, str]:
        """Return the exit code and the error with which this process ends, if it does so."""
        error = getattr(sys, "last_value", None) if self._hooked else None
        code = exits.status() or int(error is not None)
        if not code or os.getpid() != self._pid:
            return 0, ""
        return code, _exit_named(code) if error is None else _named(error)

    def close_world(self) -> None:
        """Leave in good order, at the end of a program that did not."""
        if self._world is None or os.getpid() != self._pid:
            return
        try:
            self._world.close()
        except KeyboardInterrupt:
            self._say_interrupted()
            self._end_job(INTERRUPTED, INTERRUPT)
            _exit_now(INTERRUPTED)

    def _abandon(self, reason: str) -> None:
        """Break the connection so that the others learn of this rank's loss."""
        global _failure
        _failure = _failure or reason
        abandon: Any = getattr(self._world and self._world.store, "abandon", None)
        if abandon is not None:
            abandon()


_watches: list[Watch] = []
_failure = ""


def failure() -> str:
    """Say by what error this process is ending, if it is: then it must not say goodbye to anybody.

    Returns:
        "ValueError: ...", "exit code 3", "exit code 1: no more disk"; nothing if it is well.
    """
    # Whoever asks at the end may have registered for it later, and so come before the watches.
    return _failure or next((why for _, why in (watch.ending() for watch in _watches) if why), "")


def _named(error: BaseException) -> str:
    """Say an error as the end of its traceback does, in a line."""
    return traceback.format_exception_only(error)[0].partition("\n")[0]


def _exit_named(code: int) -> str:
    """Say an exit code, with the text that was given in its place, which the interpreter prints."""
    said = getattr(exits.ending(), "code", None)
    text = "" if said is None or isinstance(said, int) else str(said).partition("\n")[0]
    return f"exit code {code}: {text}" if text else f"exit code {code}"


@atexit.register
def _close_worlds() -> None:
    for watch in list(_watches):
        watch.close_world()


_claims: list[socket.socket] = []


def _first_on_this_host(claim: str) -> bool:
    """Say whether no living process has claimed this before; the claim ends with the process."""
    claimed = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claimed.bind(f"\0allreduce.{claim}")
    except OSError:
        claimed.close()
        return False
    _claims.append(claimed)
    return True


def interactive() -> bool:
    """Say whether a person sits before this interpreter, whom an error must not throw out."""
    if hasattr(sys, "ps1") or sys.flags.interactive or "ipykernel" in sys.modules:
        return True
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _say(text: str) -> None:
    print(f"[allreduce] {text}", file=sys.stderr)
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()


def _exit_now(code: int) -> None:
    _flush()
    abrupt.exit_now(code)
