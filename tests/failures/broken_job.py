"""A job that goes wrong: broken_job.py MOMENT ACTION VICTIM.

Prints `ready PID` on every rank, and `acts now` when the victim acts.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

import numpy as np

import allreduce as ar

_, MOMENT, ACTION, VICTIM = sys.argv
_SOON = 0.3  # seconds from the moment's beginning to the action in its midst


def say(text: str) -> None:
    """Write a line at once and whole, from a signal handler too."""
    os.write(1, f"{text}\n".encode())


class BoomError(Exception):
    """An exception that no frame expects, and so none catches, wherever the signal arrives."""


def boom() -> None:
    """Raise the exception that the test expects."""
    raise BoomError(f"on rank {VICTIM}")


def leave() -> None:
    """End without sys.exit."""
    raise SystemExit(3)


ACTIONS: dict[str, Callable[[], object]] = {
    "raise": boom,
    "exit": lambda: sys.exit(3),
    "bare exit": leave,
    "os exit": lambda: os._exit(3),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "leave": lambda: sys.exit(0),
    "nothing": lambda: None,
}


def act() -> None:
    """Carry out the victim's action."""
    say("acts now")
    ACTIONS[ACTION]()


def act_soon() -> None:
    """Do it in the middle of the next code."""

    def alarm(number: int, frame: FrameType | None) -> None:
        act()

    signal.signal(signal.SIGALRM, alarm)
    signal.setitimer(signal.ITIMER_REAL, _SOON)


def train(epochs: int) -> None:
    """Fit a small model."""
    generator = np.random.default_rng(0)
    x = generator.random((256, 16), np.float32)
    y = generator.integers(0, 4, 256)
    if os.environ.get("ALLREDUCE_TRANSPORT") == "hierarchical":  # as if on two hosts
        os.environ["ALLREDUCE_HOST"] = str(int(os.environ["ALLREDUCE_RANK"]) // 2)
    strategy = ar.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = ar.nn.Sequential([ar.nn.Dense(32, "relu"), ar.nn.Dense(4, "softmax")])
        model.compile("adam", "sparse_categorical_crossentropy")
    model.fit(x, y, batch_size=64, epochs=1, verbose=0)
    begin(strategy.communicator.rank)
    model.fit(x, y, batch_size=64, epochs=epochs, verbose=0)


def begin(rank: int) -> None:
    """Say that the moment has come; the victim will act in it."""
    say(f"ready {os.getpid()}")
    if rank == int(VICTIM) and ACTION != "nothing":
        act_soon()


def in_join() -> None:
    """One rank acts, or sleeps, while the others join."""
    rank = int(os.environ.get("PMI_RANK") or os.environ["ALLREDUCE_RANK"])
    say(f"ready {os.getpid()}")
    if rank == int(VICTIM):
        time.sleep(1)  # the others are joining now
        act()
        time.sleep(600)
    ar.init()


def in_fit() -> None:
    """Train for ever."""
    train(10**9)


def in_collective() -> None:
    """All but one rank wait for that one in an all-reduce."""
    comm = ar.init()
    comm.barrier()
    begin(comm.rank)
    if comm.rank == int(VICTIM):
        time.sleep(600)
    while True:
        comm.all_reduce(np.ones(100_000))


def in_compute() -> None:
    """Every rank computes on its own, in calls that last."""
    comm = ar.init()
    comm.barrier()
    begin(comm.rank)
    matrix = np.ones((600, 600))
    while True:
        matrix = matrix @ matrix / 600.0


def at_the_end() -> None:
    """One rank's program ends while the others go on training."""
    strategy = ar.MultiWorkerMirroredStrategy()
    rank = strategy.communicator.rank
    say(f"ready {os.getpid()}")
    if rank == int(VICTIM):
        act()
        return
    train(1)


MOMENTS = {
    "join": in_join,
    "fit": in_fit,
    "collective": in_collective,
    "compute": in_compute,
    "end": at_the_end,
}
MOMENTS[MOMENT]()
