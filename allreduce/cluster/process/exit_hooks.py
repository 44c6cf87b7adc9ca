"""Hooks for the end of this process: an error of one rank ends the job on all ranks.

While a communicator is open, or this process joins a job, `sys.excepthook` and one atexit function
are ours. An uncaught exception prints its traceback and informs the other ranks at once. This
process then ends as any program does: threads end, atexit functions run. That may take
`ALLREDUCE_GRACE` seconds. Under MPI the job is aborted after that, because finalising MPI would
wait for the other ranks. Python does not pass exit codes to atexit functions: the launcher acts on
them. In a notebook or an interactive session `sys.excepthook` is left alone.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import os
import signal
import socket
import sys
import threading
import time
import weakref
import zlib
from collections.abc import Callable
from types import TracebackType
from typing import Any

from allreduce import settings
from allreduce.cluster.host import process_ancestry
from allreduce.cluster.host.claims import EndingSign, claim
from allreduce.cluster.mpi import pmi
from allreduce.cluster.process import traces
from allreduce.cluster.store import ENDING, VICTIM
from allreduce.cluster.world import World
from allreduce.errors import (
    AllreduceError,
    MismatchError,
    PeerLostError,
    UsageError,
    is_interrupt,
    leave_out_library,
)

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
INTERRUPT = "an interrupt"  # the reason that a program gives for its end

# A death elsewhere shows here before its own traceback is out, and an interrupt of the whole job
# may show as a peer's death first: a victim waits this long before it reports.
_AFTER_YOU_SECONDS = 0.5
_REASON_BYTES = 1000  # of the error that the launcher repeats
Hook = Callable[[type[BaseException], BaseException, "TracebackType | None"], object]


class Watch:
    """Ends the job when this rank ends abnormally.

    Args:
        launched: Whether the launcher watches the ranks; it then reports interrupts.
        abort: Ends all ranks with an exit code, where the world has such a means (MPI). It returns
            where it has none any more.
        abort_at_exit: Leaves that to the end of this process, after which no Python runs, if it
            can. It takes the descriptor of this rank's sign, the names that the other ranks claim
            (see `EndingSign`), and the seconds for which to wait for these.
        job: The state that the ranks of this host share before there is a world.
    """

    def __init__(
        self,
        rank: int,
        *,
        launched: bool = False,
        abort: Callable[[int], None] | None = None,
        abort_at_exit: Callable[[int, list[str], float], bool] | None = None,
        job: str = "",
    ) -> None:
        self._rank, self._launched, self._job = rank, launched, job
        self._abort, self._abort_at_exit = abort, abort_at_exit
        self._pid = os.getpid()
        self._who = f"rank {rank} (process {self._pid})"
        self._world: World | None = None
        self._code = 0  # the exit code, once this process is ending
        self._until = 0.0  # the deadline of its end
        self._sign: EndingSign | None = None
        _watches.append(self)
        _install()

    def watch(self, world: World) -> World:
        """Watch over `world` until it is closed."""
        self._world = dataclasses.replace(world, farewell=self.end)
        # Leaves the job at the end of a program that has closed its communicators, and our hooks.
        self._leave = weakref.finalize(self, world.store.close)
        self.note_hooks(removed=False)
        return self._world

    def end(self) -> None:
        """Stop watching; harmless when it has stopped."""
        if os.getpid() != self._pid:
            return
        if self._world is not None:
            process_ancestry.clear_marker()
            self._leave.detach()
            self._world = None
        if self in _watches:
            _watches.remove(self)
        if not _watches and not _open:
            _restore()

    def note_hooks(self, *, removed: bool) -> None:
        """Record whether the hooks are removed; if so, the world leaves at exit by a finalizer."""
        if self._world is None:
            return
        self._leave.atexit = removed
        if removed:
            process_ancestry.clear_marker()
        else:
            process_ancestry.set_marker(self._world.rank)

    def on_exception(
        self,
        kind: type[BaseException],
        error: BaseException,
        show: Callable[[], object],
    ) -> None:
        """End the job by an uncaught exception, which `show` prints."""
        try:
            _leave_out_library(error)
            if isinstance(error, PeerLostError):
                if self._launched and self._world is not None:  # the launcher waits for this
                    self._world.store.post(VICTIM, b"")
                time.sleep(_AFTER_YOU_SECONDS)
            if not issubclass(kind, KeyboardInterrupt):
                self._show_ending()
                if is_interrupt(error):
                    _say(str(error))
                elif self._is_shown(error):
                    _say(f"{self._who} failed with the same {kind.__name__} as another rank")
                else:
                    self.note_users_line(error)
                    show()
                self._say_victim(error)
                self._begin_to_end(1, traces.summary(error))
                self._end_within_grace()
                return
        except KeyboardInterrupt:
            pass  # treat it as the interrupt
        self._say_interrupted()
        self._begin_to_end(INTERRUPTED, INTERRUPT)
        self._end_within_grace()

    def note_users_line(self, error: BaseException) -> None:
        """Have a traceback end with the rank and the user's line: above are the library's."""
        if any(note.startswith("[allreduce]") for note in getattr(error, "__notes__", ())):
            return  # a `with` block has ended with it
        ranks = self._world is None or self._world.size > 1
        line = traces.users_line(error, source=True)
        if line is not None and (ranks or traces.ends_in_library(error)):
            who = f"rank {self._rank} " if ranks else ""
            lost = any(isinstance(each, PeerLostError) for each in traces.causes(error))
            error.add_note(f"[allreduce] {who}{'stopped' if lost else 'failed'} at {line}")

    def _say_interrupted(self) -> None:
        self._show_ending()
        with contextlib.suppress(ValueError):  # not in the main thread
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would end in a traceback
        if not self._launched:
            if self._is_first("interrupted"):  # rank 0 may be inside MPI_Init
                _say(f"interrupted: {self._who}")
            _flush()
            time.sleep(_AFTER_YOU_SECONDS)  # ending frees the claim, and mpirun then kills the rest

    def _is_first(self, event: str) -> bool:
        """Return whether this is the first rank on this host to ask, among those alive."""
        claimed = claim(f"{event}.{self._job if self._world is None else self._world.job}")
        if claimed is not None:
            _claims.append(claimed)
        return claimed is not None

    def _is_shown(self, error: BaseException) -> bool:
        """Return whether another rank of this host shows an equal error in how it is used."""
        text = traces.text(error).encode()
        return isinstance(error, UsageError) and not self._is_first(f"{zlib.crc32(text):x}")

    def _show_ending(self) -> None:
        """Show the other ranks of this host that this one is ending."""
        if self._abort is not None and self._world is not None and self._sign is None:
            self._sign = EndingSign(self._world.job, self._world.rank, self._world.size)

    def _say_victim(self, error: BaseException | None) -> None:
        """Tell the launcher if this rank ends because another one was lost, or has raised."""
        if not self._launched or self._world is None:
            return
        chain = [] if error is None else traces.causes(error)
        if any(map(_comes_from_another, chain)):
            with contextlib.suppress(AllreduceError):  # the leader is gone, too
                self._world.store.set(VICTIM, b"")

    def _begin_to_end(self, code: int, reason: str) -> None:
        """Tell the others that this process is ending; its grace period begins."""
        global _failure
        _flush()
        self._code, self._until = code, time.monotonic() + _grace()
        _failure = _failure or reason
        for listener in _failure_listeners:
            listener(reason)
        if self._launched and self._world is not None:
            with contextlib.suppress(AllreduceError):  # the leader is gone
                self._world.store.set(ENDING, reason.encode(errors="replace")[:_REASON_BYTES])
        # The end of the connection informs the others.
        abandon: Any = getattr(self._world and self._world.store, "abandon", None)
        if abandon is not None:
            abandon()

    def _end_within_grace(self) -> None:
        last = threading.Timer(self._until - time.monotonic(), self._end_now)
        last.daemon = True
        last.start()

    def _end_now(self) -> None:
        self.end_job()
        _flush()
        os._exit(self._code)

    def begin_to_exit(self) -> None:
        """Tell the others of an exception that another `sys.excepthook` has printed."""
        reason = self.ending()
        if not reason or self._code:
            return
        self._show_ending()
        self._say_victim(None)
        self._begin_to_end(1, reason)
        with contextlib.suppress(RuntimeError):  # Python 3.12 starts no threads at its end
            self._end_within_grace()

    def ending(self) -> str:
        """Return the uncaught exception that ends this process; "" for none."""
        error = getattr(sys, "last_value", None)
        if error is None or interactive() or os.getpid() != self._pid:
            return ""
        return traces.summary(error)

    @property
    def interrupted(self) -> bool:
        """Whether this process ends by its own interrupt."""
        return self._code == INTERRUPTED

    def end_job(self) -> None:
        """Abort all ranks if this process ends abnormally and MPI would wait for them."""
        if not self._code or self._abort is None or os.getpid() != self._pid:
            return
        if self._sign is not None:  # an abort would interrupt the others' ends
            self._sign.await_others(self._until)
        _flush()
        time.sleep(pmi.REPORT_SECONDS)
        self._abort(self._code)

    def end_job_at_exit(self) -> None:
        """As `end_job`, but after the atexit functions that were registered before ours."""
        if self._code in (0, INTERRUPTED) or self._sign is None or self._abort_at_exit is None:
            self.end_job()  # an interrupt ends the process by its signal, without libc's handlers
            return
        left = self._until - time.monotonic()
        if self._abort_at_exit(self._sign.fileno(), self._sign.others, left):
            self._sign.detach()  # it is closed there
            self._sign = None
        else:
            self.end_job()

    def note_failure(self, elsewhere: bool) -> None:
        """Tell the launcher that this rank has learnt of a failure, perhaps of another rank."""
        if self._launched and self._world is not None:
            self._world.store.post(VICTIM if elsewhere else ENDING, b"")

    def close_world(self) -> None:
        """Leave in good order if the program did not."""
        if self._world is None or os.getpid() != self._pid:
            return
        try:
            self._world.close()
        except KeyboardInterrupt:
            self._say_interrupted()
            self._begin_to_end(INTERRUPTED, INTERRUPT)
            self._end_now()


_watches: list[Watch] = []
_failure = ""
_failure_listeners: list[Callable[[str], None]] = []


def on_failure(listener: Callable[[str], None]) -> None:
    """Register `listener`, which is called with the error when this process begins to end."""
    _failure_listeners.append(listener)


def note_failure(elsewhere: bool) -> None:
    """Tell the launcher that this rank has learnt of a failure, and may be saving now.

    Args:
        elsewhere: Whether another rank has failed, so that this one is not to blame for its end.
    """
    for watch in list(_watches):
        watch.note_failure(elsewhere)


def prepare(error: BaseException) -> None:
    """Have the traceback of an error that may end this program show the user's lines.

    The hooks do that of an uncaught one, but are undone by then if it closes the last communicator.
    """
    _leave_out_library(error)
    if _watches and not isinstance(error, KeyboardInterrupt):
        _watches[-1].note_users_line(error)


def _leave_out_library(error: BaseException) -> None:
    for each in traces.causes(error):
        if isinstance(each, AllreduceError):
            leave_out_library(each)


def failure() -> str:
    """Return the error that is ending this process, if any: it must then not leave as if finished.

    Returns:
        "ValueError: ... (train.py:12)", or "".
    """
    return _failure or next(filter(None, (watch.ending() for watch in _watches)), "")


def _comes_from_another(error: BaseException) -> bool:
    """Return whether an error reports the end, or repeats the error, of another rank."""
    repeats = isinstance(error, MismatchError) and error.everywhere
    return repeats or isinstance(error, PeerLostError)


def interrupted() -> bool:
    """Return whether this process ends by an interrupt, of its own or of another rank."""
    own = any(watch.interrupted for watch in _watches)
    return own or is_interrupt(getattr(sys, "last_value", None))


_before_exit: list[Callable[[], None]] = []
_claims: list[socket.socket] = []  # kept until this process ends
_hooked = 0  # the process in which the hooks are set
_open = False  # whether communicators are open
_hook_before: Hook = sys.__excepthook__


def before_exit(leave: Callable[[], None]) -> None:
    """Register `leave`, called at exit if the hooks are set, in reverse order."""
    _before_exit.append(leave)


def hook() -> None:
    """Set `sys.excepthook` and the atexit function: a communicator is open."""
    global _open
    _open = True
    _install()


def unhook() -> None:
    """Undo the changes of `hook`: no communicator is open."""
    global _open
    _open = False
    _restore()


def _install() -> None:
    global _hooked, _hook_before
    if _hooked == os.getpid():
        return
    if not interactive() and sys.excepthook is not _on_exception:
        _hook_before, sys.excepthook = sys.excepthook, _on_exception
    atexit.unregister(_at_exit)  # inherited from the parent
    atexit.register(_at_exit)
    _hooked = os.getpid()
    for watch in _watches:
        watch.note_hooks(removed=False)


def _restore() -> None:
    global _hooked
    if _hooked != os.getpid():
        return
    if sys.excepthook is _on_exception:
        sys.excepthook = _hook_before
    atexit.unregister(_at_exit)
    _hooked = 0
    for watch in _watches:
        watch.note_hooks(removed=True)


def _on_exception(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    if _hooked != os.getpid() or not _watches:
        _hook_before(kind, error, trace)
    else:
        show = functools.partial(_hook_before, kind, error, trace)
        _watches[-1].on_exception(kind, error, show)


def _at_exit() -> None:
    if _hooked != os.getpid():
        return
    watches = list(_watches)
    with contextlib.ExitStack() as last:  # runs in reverse order, whatever fails
        for watch in watches:
            last.callback(watch.close_world)
            last.callback(watch.end_job_at_exit)
        for leave in _before_exit:
            last.callback(leave)
        for watch in watches:
            last.callback(watch.begin_to_exit)


def _grace() -> float:
    """Return the grace period in seconds."""
    try:
        return settings.load().grace
    except UsageError:  # invalid variables are reported elsewhere
        return settings.GRACE


def interactive() -> bool:
    """Return whether this interpreter is interactive: errors must not end it."""
    if hasattr(sys, "ps1") or sys.flags.interactive or "ipykernel" in sys.modules:
        return True
    ipython = sys.modules.get("IPython")
    return ipython is not None and ipython.get_ipython() is not None


def _say(text: str) -> None:
    print(f"[allreduce] {text}\n", end="", file=sys.stderr)  # in one piece, or ranks' lines mix
    _flush()


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
