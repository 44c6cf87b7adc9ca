"""`python -m allreduce.run -n 4 train.py`: start ranks without MPI.

Hosts the group leader on a free port, starts the processes, puts the rank before each line of
their output, and ends them together: at the first failure, at a signal, with the launcher's death.
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from allreduce import settings
from allreduce.cluster.address import LOOPBACK
from allreduce.cluster.children import Child, python, spawn
from allreduce.cluster.lineage import MARKER
from allreduce.cluster.relay import Relay
from allreduce.errors import AllreduceError

if TYPE_CHECKING:
    from allreduce.cluster.service import Leader

_KILL_SECONDS = 0.5  # between SIGTERM and SIGKILL
_INTERRUPT_SECONDS = 1.5  # between SIGINT and SIGTERM: a job ends within 3 s of Ctrl-C
_ALONE = b"-"  # the word for a world of one, which needs no leader
_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Job:
    """The ranks of one launch.

    Args:
        command: What each rank executes.
        size: How many ranks.
        grace: Seconds the others may still report after a rank has failed.
    """

    def __init__(self, command: list[str], size: int, grace: float) -> None:
        self._grace = grace
        self._secret = os.environ.get("ALLREDUCE_SECRET") or secrets.token_hex(32)
        self._size = size
        self._children = [spawn(rank, command, self._environment(rank)) for rank in range(size)]
        self._selector = selectors.DefaultSelector()
        self._relays: dict[int, Relay] = {}
        self._plan: list[tuple[float, signal.Signals]] = []  # when to send what to those that live
        self._caught: list[signal.Signals] = []
        self._stop: signal.Signals | None = None
        self._first: Child | None = None  # who ended first with an error
        self._culprit: Child | None = None  # whose loss that was, where the leader knows
        self._leader: Leader | None = None

    def run(self) -> int:
        """Run to the end; returns the exit code."""
        for child in self._children:
            for source, sink in ((child.stdout, sys.stdout), (child.stderr, sys.stderr)):
                self._relays[source] = Relay(source, sink.buffer, child.rank)
                self._selector.register(source, selectors.EVENT_READ)
        self._wake_on_signals()
        try:
            word = self._host()
            for child in self._children:
                child.start(word)
            while any(child.code is None for child in self._children):
                self._turn()
            for source in list(self._relays):
                self._pump(source)
        finally:
            self._send(signal.SIGKILL)
            if self._leader is not None:
                self._leader.close()
        return self._code()

    def _environment(self, rank: int) -> Callable[[bytes], dict[str, str]]:
        launcher = os.getpid()

        def build(word: bytes) -> dict[str, str]:
            environment = dict(os.environ)
            for name in (MARKER, "ALLREDUCE_LEADER", "FORCE_COLOR"):
                environment.pop(name, None)
            own = {"RANK": rank, "SIZE": self._size, "SECRET": self._secret, "LAUNCHED": launcher}
            if word != _ALONE:
                own["LEADER"] = word.decode()
            environment |= {settings.PREFIX + name: str(value) for name, value in own.items()}
            return environment | {"PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}

        return build

    def _host(self) -> bytes:
        """Start the leader; returns its address, as the word for the children."""
        if self._size == 1:
            return _ALONE
        from allreduce.cluster.service import Leader

        timeout = settings.load().timeout
        self._leader = Leader(f"{LOOPBACK}:0", self._size, self._secret.encode(), timeout)
        return self._leader.address.encode()

    def _wake_on_signals(self) -> None:
        """Let signals end the selector's wait; they are acted upon in the loop."""
        reading, writing = os.pipe()
        for end in (reading, writing):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        self._selector.register(reading, selectors.EVENT_READ)

        def catch(number: int, _: FrameType | None) -> None:
            self._caught.append(signal.Signals(number))

        for number in _FORWARDED:
            signal.signal(number, catch)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _turn(self) -> None:
        """Wait for something to happen, and act on it."""
        wait = max(0.0, self._plan[0][0] - time.monotonic()) if self._plan else None
        for key, _ in self._selector.select(wait):
            if key.fd in self._relays:
                self._pump(key.fd)
            else:
                os.read(key.fd, 4096)
        while self._caught:
            self._forward(self._caught.pop(0))
        for child in self._children:
            if child.reap():
                self._pump(child.stdout, last=True)
                self._pump(child.stderr, last=True)
                if child.code and self._first is None:
                    self._fail(child)
        if self._plan and time.monotonic() >= self._plan[0][0]:
            self._send(self._plan.pop(0)[1])

    def _pump(self, source: int, *, last: bool = False) -> None:
        relay = self._relays.get(source)
        if relay is None:
            return
        try:
            more = relay.pump()
            if last:
                relay.finish()
        except BrokenPipeError:  # as if we had been killed by it: nobody reads what ranks print
            self._discard_output()
            self._forward(signal.SIGPIPE)
            return
        if last or not more:
            self._forget(source)

    def _discard_output(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (sys.stdout, sys.stderr):
            os.dup2(nowhere, stream.fileno())

    def _forget(self, source: int) -> None:
        self._selector.unregister(source)
        del self._relays[source]
        os.close(source)

    def _forward(self, number: signal.Signals) -> None:
        if self._stop is not None:  # the second time: at once
            self._send(signal.SIGKILL)
            return
        self._stop = number
        polite = number == signal.SIGINT
        if polite:
            _say("interrupted")
            for relay in self._relays.values():
                relay.interrupted = True
        self._send(number if number in _FORWARDED else signal.SIGTERM)
        self._end_after(_INTERRUPT_SECONDS if polite else self._grace)

    def _fail(self, child: Child) -> None:
        """Plan the end of the others.

        The leader knows whose connection broke first. The rank that ends first may be another one,
        which failed for want of it.
        """
        self._first = child
        lost = self._leader.first_lost if self._leader is not None else None
        self._culprit = self._children[lost] if lost is not None else None
        if self._stop is None:
            others = sum(other.code is None for other in self._children)
            ending = f"; ending the other {others}" if others else ""
            _say(f"rank {child.rank} (process {child.pid}) {_fate(child.code or 0)}{ending}")
            self._end_after(self._grace)

    def _end_after(self, seconds: float) -> None:
        now = time.monotonic()
        self._plan = [
            (now + seconds, signal.SIGTERM),
            (now + seconds + _KILL_SECONDS, signal.SIGKILL),
        ]

    def _send(self, number: signal.Signals) -> None:
        for child in self._children:
            child.signal(number)

    def _code(self) -> int:
        """Return the exit code: a forwarded signal's, or the first failing rank's."""
        if self._stop is not None:
            return 128 + self._stop
        if self._first is None:
            return 0
        return (self._culprit and self._culprit.code) or self._first.code or 0


def _fate(code: int) -> str:
    if code > 128 and code - 128 in signal.valid_signals():
        return f"was killed by {signal.Signals(code - 128).name}"
    return f"failed with exit code {code}"


def _say(text: str) -> None:
    print(f"[allreduce.run] {text}", file=sys.stderr, flush=True)


def launch(
    command: Annotated[
        list[str], typer.Argument(help="The script, or with -m the module, and its arguments.")
    ],
    processes: Annotated[
        int, typer.Option("--processes", "-n", min=1, help="How many ranks to start.")
    ],
    module: Annotated[
        bool, typer.Option("--module", "-m", help="Run a module, as python -m does.")
    ] = False,
    grace: Annotated[
        float, typer.Option(min=0.0, help="Seconds others may report after a rank has failed.")
    ] = 1.5,
) -> None:
    """Start ranks of a program on this machine, without MPI."""
    if not module and not Path(command[0]).exists():
        raise typer.BadParameter(f"there is no file {command[0]!r}", param_hint="COMMAND")
    try:
        settings.load()
        code = Job(python([*(["-m"] if module else []), *command]), processes, grace).run()
    except AllreduceError as error:
        _say(str(error))
        code = 1
    raise typer.Exit(code)


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command(context_settings={"allow_interspersed_args": False})(launch)

if __name__ == "__main__":
    app()
