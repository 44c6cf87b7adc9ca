"""One process of a contestant of benchmarks/training.py: it trains on request.

Needs only NumPy and the contestant's packages: peers run it in their own environments.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, cast

from trainers import TRAINERS

Batches = Iterator[tuple[Any, ...]]  # each is the arguments of a side's step


class Side(Protocol):
    """One process's part of a contestant in one case, or one thread's."""

    about: str  # the library's name and version

    def step(self, *batch: Any) -> Any:
        """Do one step; returns what `number` makes a number of."""

    def number(self, result: Any) -> float:
        """Return this process's loss, or another result of the step."""

    def figures(self, seconds: float) -> dict[str, float]:
        """Measure other figures than a step's time, for about this long; a collective call."""


class BackwardSide(Side, Protocol):
    """A side of a case with `Workload.backward`."""

    def backward(self, *batch: Any) -> Any:
        """Compute a step's gradients without what follows."""


def main() -> None:
    parser = argparse.ArgumentParser(description="Take turns as one process of a contestant.")
    parser.add_argument("trainer", choices=TRAINERS)
    parser.add_argument("case", help="a key of workloads.WORKLOADS")
    parser.add_argument("--address", required=True, help="of the socket where turns are given")
    parser.add_argument("--rank", type=int, default=-1, help="where no launcher tells it")
    parser.add_argument("--ports", type=int, nargs="+", required=True, help="free ones, one each")
    options = parser.parse_args()
    sides = _sides(options)
    if len(sides) == 1:  # in the main thread, as some libraries require
        _meet(options.address, *sides[0])
        return
    with ThreadPoolExecutor(len(sides)) as threads:
        list(threads.map(lambda each: _meet(options.address, *each), sides))


def _sides(options: argparse.Namespace) -> list[tuple[int, Side, Batches]]:
    """Build the models to train here; return each one's number of replicas, and its samples.

    A thread that trains separately takes turns like a process.
    """
    trainer = TRAINERS[options.trainer]
    # First: allreduce may choose other kernels of NumPy's, if that is not imported yet.
    module = importlib.import_module(f"trainers.{trainer.module}")
    workload = importlib.import_module("workloads").WORKLOADS[options.case]
    ranks = range(len(options.ports))

    def built(rank: int) -> tuple[int, Side]:
        made: tuple[int, Side] = module.build(options.trainer, workload, rank, options.ports)
        return made

    def samples(rank: int) -> Batches:
        found: Batches = workload.batches(rank, len(ranks))
        return found

    if not trainer.in_one:
        rank, side = built(options.rank)
        return [(1, side, samples(rank))]
    groups = [ranks] if trainer.in_one == "devices" else [ranks[rank : rank + 1] for rank in ranks]
    return [
        (len(group), built(group[0])[1], zip(*map(samples, group), strict=True)) for group in groups
    ]


def _meet(address: str, replicas: int, side: Side, batches: Batches) -> None:
    with socket.socket(socket.AF_UNIX) as wire:
        wire.connect(address)
        with wire.makefile("rw") as talk:
            _say(talk, {"replicas": replicas, "about": side.about})
            _take_turns(talk, side, batches)


def _take_turns(talk: Any, side: Side, batches: Batches) -> None:
    """Carry out requests, line by line, until the end of the input."""
    for line in talk:
        task, amount = json.loads(line)
        if task == "steps":
            _say(talk, _time(side.step, side.number, batches, amount))
        elif task == "backward":
            step = cast(BackwardSide, side).backward
            _say(talk, _time(step, lambda _: 0.0, batches, amount))
        elif task == "losses":
            _say(talk, [side.number(side.step(*next(batches))) for _ in range(amount)])
        else:
            _say(talk, side.figures(amount))


def _time(
    step: Callable[..., Any], number: Callable[[Any], float], batches: Batches, steps: int
) -> list[float]:
    """Return when the first step began, and when each was over, by the clock of the host."""
    moments = [time.perf_counter()]
    for last, batch in enumerate(itertools.islice(batches, steps), 1):
        result = step(*batch)
        if last == steps:
            number(result)  # whoever has only been told to compute it has to do so now
        moments.append(time.perf_counter())
    return moments


def _say(talk: Any, what: Any) -> None:
    talk.write(json.dumps(what) + "\n")
    talk.flush()


if __name__ == "__main__":
    main()
