"""The launcher's processes: started early, let go later, ended together, never left behind."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from allreduce import openblas
from allreduce.cluster.host.machine import STATES, process_state
from allreduce.cluster.host.process_ancestry import MARKER
from allreduce.cluster.process.exit_hooks import INTERRUPTED
from allreduce.settings import PREFIX

FILES = 3  # that a child keeps open in the launcher
ALONE = b"-"  # the word for a world of one, which needs no leader
_PR_SET_PDEATHSIG = 1  # prctl(2)
_libc = ctypes.CDLL(None, use_errno=True)  # looked up before any fork


@dataclass
class Child:
    """One rank's process, in a session of its own."""

    rank: int
    pid: int
    stdout: int  # the reading ends of its pipes
    stderr: int
    gate: int
    code: int | None = None  # as shells have it: 128 + n after signal n; None while it runs
    told: bool = False  # whether it has been told to end

    def start(self, word: bytes) -> None:
        """Let it go: it learns `word` and executes its program."""
        os.write(self.gate, word)
        os.close(self.gate)

    def signal(self, number: int) -> None:
        """Send a signal to it and to what it has started; harmless once it has ended."""
        if self.code is None:
            try:
                os.killpg(self.pid, number)
            except ProcessLookupError:  # it has not made its session yet
                os.kill(self.pid, number)

    def end(self) -> None:
        """Ask it to end, once; a stopped process goes on, because it would not act on that."""
        if self.told or self.code is not None:
            return
        self.told = True
        self.signal(signal.SIGTERM)
        self.signal(signal.SIGCONT)

    @property
    def debugged(self) -> bool:
        """Whether a debugger stops it, so that it acts on no signal but SIGKILL."""
        return process_state(self.pid).endswith(STATES["t"])

    @property
    def fate(self) -> str:
        """How it ended, for people."""
        code = self.code
        if code is None:
            return "was lost to the others, and has not ended"
        if code == 0:
            return "ended with exit code 0, but without leaving the job"
        if code == INTERRUPTED:
            return f"was interrupted (exit code {code})"
        if code > 128 and code - 128 in signal.valid_signals():
            return f"was killed by {signal.Signals(code - 128).name}"
        return f"failed with exit code {code}"

    def reap(self) -> bool:
        """Note whether it has ended; then nothing of its group lives either."""
        if self.code is not None:
            return False
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return False
        self.signal(signal.SIGKILL)  # before the wait, while its number cannot be anybody else's
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.code = code if code >= 0 else 128 - code
        return True


def spawn(
    rank: int, command: list[str], environment: Callable[[bytes], Mapping[str, str]]
) -> Child:
    """Fork a child that waits at its gate; to be called before this process has threads.

    The leader's address is known only when its threads run, and forking beside threads is unsafe.
    So children are forked first; each executes `command` once it has been told the address.

    Args:
        rank: The child's rank.
        command: The program and its arguments.
        environment: Makes its environment from the word that it will be told.
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
        if os.getppid() != launcher:  # it died before the line above
            os._exit(1)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(outputs[0], 1)
        os.dup2(outputs[1], 2)
        os.closerange(3, gate)
        os.closerange(gate + 1, os.sysconf("SC_OPEN_MAX"))
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # Python ignores it; programs expect it
        word = os.read(gate, 4096)
        if not word:  # the launcher gave up
            os._exit(1)
        os.set_inheritable(gate, False)
        os.execve(command[0], command, dict(environment(word)))
    except BaseException as error:
        os.write(2, f"cannot execute {command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def environment(
    rank: int, size: int, secret: str, grace: float
) -> Callable[[bytes], dict[str, str]]:
    """Return what makes a rank's environment from the word: the leader's address, or `ALONE`."""
    launcher = os.getpid()

    def build(word: bytes) -> dict[str, str]:
        environment = dict(os.environ)
        for name in (MARKER, "ALLREDUCE_LEADER", "FORCE_COLOR"):
            environment.pop(name, None)
        own = {"RANK": rank, "SIZE": size, "SECRET": secret, "LAUNCHED": launcher, "GRACE": grace}
        if word != ALONE:
            own["LEADER"] = word.decode()
        environment |= {PREFIX + name: str(value) for name, value in own.items()}
        environment |= openblas.choice(environment)
        return environment | {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}

    return build


def python(arguments: Sequence[str]) -> list[str]:
    """Put this interpreter before `arguments`."""
    return [sys.executable, *arguments]
