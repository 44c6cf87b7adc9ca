"""The launcher's processes: fork early, start later, end together, leave none behind.

Also for watching them: signals as a pollable file, and the detection of stopped ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from allreduce import openblas
from allreduce.cluster.host.machine import STATES, STOPPED, process_state
from allreduce.cluster.host.process_ancestry import MARKER
from allreduce.cluster.process.exit_hooks import INTERRUPTED
from allreduce.settings import PREFIX

FILES = 3  # descriptors that each child keeps open in the launcher
NO_LEADER = b"-"  # sent instead of an address to a world of one
_OTHER_JOB = ("RANK", "SIZE", "LEADER", "LAUNCHED", "CLUSTER", "TASK")
# The launcher's place in another job, or in a cluster.
_PLACE = (MARKER, "TF_CONFIG", *(f"{PREFIX}{name}" for name in _OTHER_JOB))
_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)  # looked up before any fork


@dataclass
class Child:
    """One rank's process, in its own session."""

    rank: int
    pid: int
    stdout: int  # the reading ends of its pipes
    stderr: int
    gate: int  # writing the leader's address here starts the program
    code: int | None = None  # exit code, 128 + n after signal n as in shells; None while it runs
    ending: bool = False  # whether it was asked to end
    task: str = ""  # in a cluster: "worker:0"
    serves: bool = False  # whether it runs until it is asked to end
    error: str = ""  # the error of the last traceback that it wrote

    @property
    def label(self) -> str:
        """The prefix of its lines of output."""
        return self.task or str(self.rank)

    @property
    def name(self) -> str:
        """Its name in messages."""
        return self.task or f"rank {self.rank}"

    def start(self, leader: bytes) -> None:
        """Have it execute its program with the leader's address, or `NO_LEADER`."""
        os.write(self.gate, leader)
        os.close(self.gate)

    def signal(self, number: int) -> None:
        """Send a signal to its process group; harmless once it has ended."""
        if self.code is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it has not called setsid yet
                os.kill(self.pid, number)

    def end(self) -> None:
        """Send SIGTERM once, and SIGCONT so that a stopped process acts on it."""
        if self.ending or self.code is not None:
            return
        self.ending = True
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    @property
    def debugged(self) -> bool:
        """Whether a debugger has stopped it, so that only SIGKILL has an effect."""
        return process_state(self.pid).endswith(STATES["t"])

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error or, if it serves others, before it was asked to."""
        return self.code is not None and not self.ending and (self.code != 0 or self.serves)

    @property
    def exit_text(self) -> str:
        """How it ended, for messages."""
        code = self.code
        if code is None:
            return "was lost to the others, and has not ended"
        if code == 0 and self.serves:
            return "ended with exit code 0 before the tasks that it serves"
        if code == 0:
            return "ended with exit code 0, but without leaving the job"
        if code == INTERRUPTED:
            return f"was interrupted (exit code {code})"
        if code > 128 and code - 128 in signal.valid_signals():
            return f"was killed by {signal.Signals(code - 128).name}"
        return f"failed with exit code {code}"

    def reap(self) -> bool:
        """Return whether it has just ended; kills the rest of its process group."""
        if self.code is not None:
            return False
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        self.signal(signal.SIGKILL)  # before the wait, while its pid cannot be reused
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.code = code if code >= 0 else 128 - code
        return True


def spawn(
    rank: int, command: list[str], environment: Callable[[bytes], Mapping[str, str]]
) -> Child:
    """Fork a child that waits for the leader's address; call this before the process has threads.

    The leader has an address only once its threads run, and forking a process with threads is
    unsafe. So children are forked first, and execute `command` when they receive the address.

    Args:
        environment: Builds its environment from the leader's address.
    """
    pipes = [os.pipe() for _ in range(3)]
    (gate, gate_write), (stdout, stdout_write), (stderr, stderr_write) = pipes
    launcher = os.getpid()
    pid = os.fork()
    if pid == 0:
        _become(launcher, command, environment, gate, (stdout_write, stderr_write))
    for end in (gate, stdout_write, stderr_write):
        os.close(end)
    for end in (stdout, stderr):
        os.set_blocking(end, False)
    return Child(rank, pid, stdout, stderr, gate_write)


def _become(
    launcher: int,
    command: list[str],
    environment: Callable[[bytes], Mapping[str, str]],
    gate: int,
    outputs: tuple[int, int],
) -> NoReturn:
    try:
        os.setsid()
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it died before prctl
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)
        os.closerange(3, gate)
        os.closerange(gate + 1, os.sysconf("SC_OPEN_MAX"))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; programs expect it
        leader = os.read(gate, 4096)
        if not leader:  # the launcher gave up
            os._exit(1)
        os.set_inheritable(gate, False)
        os.execve(command[0], command, dict(environment(leader)))
    except BaseException as error:
        os.write(2, f"cannot execute {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def environment(own: Mapping[str, object]) -> Callable[[bytes], dict[str, str]]:
    """Return a function from the leader's address, or `NO_LEADER`, to a child's environment.

    Args:
        own: The child's settings, by name; it inherits no other place in a job.
    """

    def build(leader: bytes) -> dict[str, str]:
        environment = dict(os.environ)
        for name in (*_PLACE, "FORCE_COLOR"):
            environment.pop(name, None)
        settings = own if leader == NO_LEADER else {**own, "LEADER": leader.decode()}
        environment |= {PREFIX + name: str(value) for name, value in settings.items()}
        environment |= openblas.choice(environment)
        return environment | {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}

    return build


class Signals:
    """Catches signals; a child's end wakes the poll, too.

    Attributes:
        fd: Readable when a signal has arrived.
    """

    FILES = 2  # descriptors that it keeps open

    def __init__(self, numbers: Iterable[signal.Signals]) -> None:
        self._caught: list[signal.Signals] = []
        self.fd, self._writing = os.pipe()
        for end in (self.fd, self._writing):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in numbers:
            signal.signal(number, self._catch)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def wake(self) -> None:
        """Make `fd` readable, from any thread."""
        with contextlib.suppress(BlockingIOError):  # the pipe is full, hence readable
            os.write(self._writing, b"\0")

    def clear(self) -> None:
        """Drain `fd`: it is readable again at the next signal."""
        os.read(self.fd, 4096)

    def take(self) -> signal.Signals | None:
        """Return the oldest signal that was not taken yet."""
        return self._caught.pop(0) if self._caught else None

    def _catch(self, number: int, _: FrameType | None) -> None:
        self._caught.append(signal.Signals(number))


class StoppedRanks:
    """Reports ranks that a signal or a debugger has stopped: they look like ranks at work."""

    def __init__(self, children: Sequence[Child]) -> None:
        self._children = children
        self._seen = self._reported = ""

    def report(self) -> str:
        """Return a message, once, when two looks in a row found the same stopped ranks."""
        living = [child for child in self._children if child.code is None]
        states = [(child.rank, process_state(child.pid)) for child in living]
        found = ", ".join(f"rank {rank} ({state})" for rank, state in states if STOPPED in state)
        settled, self._seen = found == self._seen, found
        if not settled or found == self._reported:
            return ""
        self._reported = found
        return found and f"waiting for {found}"
