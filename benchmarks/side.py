"""One process of a contestant of benchmarks/training.py: it trains when it is told to.

Needs NumPy alone, and what the contestant itself needs: peers run it in environments of their own.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import socket
import time
from collections.abc import Iterator
from typing import Any, Protocol

from trainers import TRAINERS
from workloads import WORKLOADS
from workloads.base import Array, Workload


class Side(Protocol):
    """One process's part of a contestant in one case."""

    about: str  # the library's name and version

    def step(self, *batch: Array) -> Any:
        """Do one step; returns what `number` makes a number of."""

    def number(self, result: Any) -> float:
        """Return this process's loss, or what else shows what a step has computed."""

    def figures(self, seconds: float) -> dict[str, float]:
        """Measure what is not a step's time, for about so long; a collective call."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Take turns as one process of a contestant.")
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("case", choices=WORKLOADS)
    parser.add_argument("--address", required=True, help="of the socket where turns are given")
    parser.add_argument("--rank", type=int, default=-1, help="where no launcher tells it")
    parser.add_argument("--ports", type=int, nargs="+", required=True, help="free ones, one each")
    options = parser.parse_args()
    module = importlib.import_module(f"trainers.{TRAINERS[options.trainer].module}")
    workload = WORKLOADS[options.case]
    ranks = len(options.ports)
    rank, side = module.build(options.trainer, workload, options.rank, options.ports)
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(options.address)
        with wire.makefile("rw") as talk:
            _take_turns(talk, side, workload, rank, ranks)


def _take_turns(talk: Any, side: Side, workload: Workload, rank: int, ranks: int) -> None:
    """Do what is asked, line by line, until nobody asks any more."""
    batches = workload.batches(rank, ranks)
    _say(talk, {"rank": rank, "about": side.about})
    for line in talk:
        task, amount = json.loads(line)
        if task == "steps":
            _say(talk, _time(side, batches, amount))
        elif task == "losses":
            _say(talk, [side.number(side.step(*next(batches))) for _ in range(amount)])
        else:
            _say(talk, side.figures(amount))


def _time(side: Side, batches: Iterator[tuple[Array, ...]], steps: int) -> list[float]:
    """Return when the first step began, and when each was over, by the clock of the host."""
    moments = [time.perf_counter()]
    for last, batch in enumerate(itertools.islice(batches, steps), 1):
        result = side.step(*batch)
        if last == steps:
            side.number(result)  # whoever has only been told to compute it has to do so now
        moments.append(time.perf_counter())
    return moments


def _say(talk: Any, what: Any) -> None:
    talk.write(json.dumps(what) + "\n")
    talk.flush()


if __name__ == "__main__":
    main()
