"""Record the work of all ranks on one clock, as a trace for Perfetto or Chrome's tracing page.

Source of the format: Trace Event Format, Google, "Complete Events" and "Metadata Events".
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from os import PathLike
from os.path import exists
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from allreduce import comm, events
from allreduce.comm import Communicator, exchange, exchange_plain
from allreduce.errors import AllreduceError, UsageError
from allreduce.files import refusal
from allreduce.graph.consistency.rank_check import Fact
from allreduce.training.facts import check_equal, raising_on_all_ranks

_ROUNDS = 8  # of comparing clocks between hosts; the one in which ranks met fastest counts

# Name, start, seconds, lane, thread, further fields. The thread is the one that was busy with it;
# spans that do not occupy a thread have none.
Span = tuple[str, float, float, str, str, dict[str, Any]]


def timeline(path: str | PathLike[str]) -> Timeline:
    """Record the steps that run in a `with` block, of all ranks, and write them to one file.

    All ranks enter and leave the block together; rank 0 writes. Open the file with
    https://ui.perfetto.dev. A process is a rank, and each of its replicas has a lane per stream:
    what it computed and when it waited, and its collectives from their start until they were
    awaited. Instructions take about three microseconds more while they are recorded.

    Ranks of one host share a clock; between hosts clocks agree to about the time of a barrier.

    If the block raises on a rank, it does not wait for others, and writes its own records to
    "<name>.rank<number>.json".

    Args:
        path: The file, "trace.json".

    Raises:
        UsageError: It is no path, no .json, or cannot be written.
        MismatchError: Ranks name different files.
    """
    return Timeline(path)


class Timeline:
    """A recording, which begins and ends with its `with` block; `timeline` makes one."""

    def __init__(self, path: str | PathLike[str]) -> None:
        if not isinstance(path, str | PathLike):
            raise UsageError(f"a timeline is written to a file; name one, not {path!r:.60}")
        self._path = Path(path)
        if self._path.suffix != ".json":
            raise UsageError(f"a timeline is JSON; call the file .json, not {str(path)!r}")
        self._spans: list[Span] = []
        self._stop: Callable[[], None] | None = None

    def __enter__(self) -> Self:
        if self._stop is not None:
            raise UsageError("this timeline is being recorded already; make another one")
        self._communicator = comm.init()
        with raising_on_all_ranks(self._communicator, "timeline"):
            if self._communicator.rank == 0:  # before the work that would be recorded in vain
                is_new = not exists(self._path)
                _put(self._path, "", "a")
                if is_new:
                    self._path.unlink()
        path = Fact(str(self._path), "name the same file on every rank: rank 0 writes it for all")
        check_equal(self._communicator, "timeline", {"the path": path})
        self._spans.clear()
        self._stop = events.subscribe(self._record)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        assert self._stop is not None
        self._stop()
        self._stop = None
        communicator = self._communicator
        rank = communicator.rank
        if kind is not None:
            self._save_alone()
            return
        try:
            late = _behind(communicator)
            ranks = exchange_plain(
                communicator, "what a timeline has recorded", [late, self._spans]
            )
        except AllreduceError:  # another rank's block raised, or it is gone
            self._save_alone()
            raise
        with raising_on_all_ranks(communicator, "timeline"):
            if rank == 0:
                _write(
                    self._path,
                    [(each, _earlier(*part)) for each, part in enumerate(ranks)],
                )
        check_equal(communicator, "timeline", {})

    def _save_alone(self) -> None:
        rank = self._communicator.rank
        own = self._path.with_suffix(f".rank{rank}.json")
        try:
            _write(own, [(rank, self._spans)])
        except UsageError as failure:  # another error is the one to be raised
            events.logger.warning("%s", failure)

    def _record(self, event: events.Event) -> None:
        fields = {key: each for key, each in event.fields.items() if each != ""}
        thread = threading.current_thread().name
        stream, device = fields.pop("stream", thread), fields.pop("device", "")
        replica = fields.pop("replica", None)
        who = "" if replica is None else f"replica {replica}"
        lane = " ".join(filter(None, (who, device, stream)))
        busy = "" if stream == "collective" else thread
        self._spans.append((event.name, event.start, event.seconds, lane, busy, fields))


def _behind(communicator: Communicator) -> float:
    """Return how many seconds this rank's clock is ahead of rank 0's; 0 on its host."""
    world = comm.world()
    if len(world.hosts) == 1:
        return 0.0
    rounds = []
    for _ in range(_ROUNDS):
        before = time.perf_counter()
        communicator.barrier()
        rounds.append((before, time.perf_counter()))
    found = exchange(communicator, "clocks", np.asarray(rounds))  # (ranks, rounds, 2)
    spent = (found[:, :, 1] - found[:, :, 0]).min(axis=0)  # by the last member of each
    ends = found[:, int(spent.argmin()), 1]
    on_first = next(ranks for ranks in world.hosts if 0 in ranks)
    return 0.0 if communicator.rank in on_first else float(ends[communicator.rank] - ends[0])


def _earlier(seconds: float, spans: Sequence[Sequence[Any]]) -> list[Span]:
    return [(name, start - seconds, *rest) for name, start, *rest in spans]


def _write(path: Path, ranks: Sequence[tuple[int, Sequence[Span]]]) -> None:
    first = min((span[1] for _, spans in ranks for span in spans), default=0.0)
    listed: list[dict[str, Any]] = []
    for rank, recorded in ranks:
        spans = _apart(recorded)
        listed.append(_named("process_name", rank, 0, f"rank {rank}"))
        lanes = {lane: number for number, lane in enumerate(sorted({span[3] for span in spans}))}
        listed += [_named("thread_name", rank, number, lane) for lane, number in lanes.items()]
        for name, start, seconds, lane, _, fields in spans:
            times = {"ts": (start - first) * 1e6, "dur": seconds * 1e6}
            place = {"pid": rank, "tid": lanes[lane]}
            listed.append({"name": name, "ph": "X", **times, **place, "args": fields})
    _put(path, json.dumps({"traceEvents": listed, "displayTimeUnit": "ms"}), "w")


def _put(path: Path, text: str, mode: str) -> None:
    try:
        with path.open(mode) as file:
            file.write(text)
    except OSError as error:
        raise UsageError(f"cannot write the timeline {path}: {refusal(error)}") from error


def _apart(spans: Sequence[Span]) -> list[Span]:
    """Give overlapping spans separate lanes.

    Within a lane, viewers can show nested spans, but no other overlaps.
    """
    open_in: dict[str, list[list[tuple[float, str]]]] = {}  # of each lane's parts: end and thread
    found = []
    for span in sorted(spans, key=lambda span: (span[1], -span[2])):
        name, start, seconds, lane, thread, fields = span
        parts = open_in.setdefault(lane, [])
        place = next((i for i, part in enumerate(parts) if _fits(span, part)), len(parts))
        if place == len(parts):
            parts.append([])
        parts[place].append((start + seconds, thread))
        named = f"{lane} {place + 1}" if place else lane
        found.append((name, start, seconds, named, thread, fields))
    return found


def _fits(span: Span, around: list[tuple[float, str]]) -> bool:
    """Return whether a span is a part of the innermost one that has not ended, or all have."""
    _, start, seconds, _, thread, _ = span
    while around and around[-1][0] <= start:
        around.pop()
    if not around:
        return True
    end, outer = around[-1]
    return bool(thread) and thread == outer and start + seconds <= end


def _named(what: str, rank: int, lane: int, name: str) -> dict[str, Any]:
    return {"name": what, "ph": "M", "pid": rank, "tid": lane, "args": {"name": name}}
