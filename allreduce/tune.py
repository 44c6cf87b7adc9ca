"""`python -m allreduce.tune`: measure this machine, and store what does better than the defaults.

Alone it starts ranks of its own, on this host. Under mpirun or the launcher it measures between
the ranks that it finds, over the transport that they use.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table as Picture

from allreduce.cluster.launchers import rank_of_several
from allreduce.comm import init, replica_communicators, world
from allreduce.comm.choice import stored
from allreduce.comm.choice.choosing import BUILT_IN, Choice, Table
from allreduce.comm.choice.measuring import compare
from allreduce.comm.choice.table import ALGORITHMS, Row
from allreduce.comm.choice.tuning import Cell, Outcome, cells, merged, tables
from allreduce.comm.communicator import Communicator
from allreduce.comm.cores import own_cores
from allreduce.comm.plan import in_units
from allreduce.errors import AllreduceError, JoinError, UsageError, unknown_name

_STARTING_SECONDS = 60.0  # for ranks to start and to end, beyond what they measure


def measure(transport: str | None, seconds: float) -> list[Outcome]:
    """Measure between the ranks of this job; a collective call.

    Args:
        transport: Over which transport; that of the job without it.
        seconds: How long.

    Raises:
        UsageError: There is one rank only, or nothing to choose on the transport.
    """
    home = init(transport=transport)
    if home.size == 1:
        raise UsageError("[tune] one rank has nobody to exchange anything with; start several")
    if home.transport not in ("shared", "tcp"):
        raise UsageError(
            f"[tune] there is nothing to choose on the {home.transport} transport; run it with "
            "--transport shared on one host, or --transport tcp"
        )
    crowded = home.transport == "shared" and home.size > _cores(home)
    pulls = home._transport.pulls
    choices = Table().choices(home.transport, home.size, crowded, pulls=pulls)
    plan = cells(choices, home.transport, home.size)
    comms = _communicators(home.transport, plan)
    outcomes = []
    end = time.monotonic() + seconds
    for left, cell in zip(range(len(plan), 0, -1), plan, strict=True):
        share = home.broadcast_object((end - time.monotonic()) / left)
        if share <= 0:
            break
        parts = compare(home, comms, cell, share)
        outcomes.append(Outcome(home.transport, home.size, crowded, cell, parts))
    for comm in comms:
        comm.close()
    if home.rank == 0 and len(outcomes) < len(plan):
        done = f"{len(outcomes)} of {len(plan)} comparisons"
        print(f"[tune] there was time for {done}; --seconds gives more", file=sys.stderr)
    return outcomes


def _cores(home: Communicator) -> int:
    """Count the cores of all ranks."""
    return len({core for own in home.all_gather_object(own_cores()) for core in own})


def _communicators(transport: str, plan: list[Cell]) -> list[Communicator]:
    """Make a communicator for the cells' first candidates, one for their second ones ..."""
    made = []
    for table in tables(transport, plan):
        with stored.override(table):
            made += replica_communicators(world(), 1, name="tune")
    return made


def started(ranks: int, transport: str, seconds: float) -> list[Outcome]:
    """Start ranks on this host, and have them measure."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "outcomes.json"
        command = [sys.executable, "-m", "allreduce.run", "-n", str(ranks), "-m", "allreduce.tune"]
        command += ["--transport", transport, "--seconds", str(seconds), "--report", str(report)]
        quiet = {"ALLREDUCE_LOG_LEVEL": "WARNING", **os.environ}
        ended = subprocess.run(command, env=quiet, timeout=seconds + _STARTING_SECONDS)
        if ended.returncode:
            raise JoinError(f"[tune] {ranks} ranks could not measure; they say why above")
        return [_outcome(found) for found in json.loads(report.read_text())]


def _outcome(found: dict[str, Any]) -> Outcome:
    cell = found.pop("cell")
    candidates = tuple(Choice(**choice) for choice in cell.pop("candidates"))
    low, high = cell.pop("bytes")
    parts = tuple(tuple(one) for one in found.pop("parts"))
    made = Cell(**cell, bytes=(low, high), candidates=candidates)
    return Outcome(**found, cell=made, parts=parts)


def show(outcomes: list[Outcome]) -> None:
    """Print what was found, against the defaults."""
    picture = Picture(title="microseconds that the slowest rank takes")
    for name in ("ranks", "collective", "bytes", "built-in", "fastest", "stored"):
        picture.add_column(name, no_wrap=True)
    for one in outcomes:
        fastest = min(range(len(one.parts)), key=one.seconds)
        memory = " in comm.empty" if one.cell.symmetric else ""
        picture.add_row(
            *(f"{one.members} {one.transport}", one.cell.collective + memory),
            in_units(one.cell.nbytes),
            _timed(one, 0),
            _timed(one, fastest) if fastest else "",
            f"{one.seconds(0) / one.seconds(one.best):.2f} times" if one.best else "",
        )
    Console(width=None if sys.stdout.isatty() else 200).print(picture)


def _timed(one: Outcome, candidate: int) -> str:
    choice = one.cell.candidates[candidate]
    chunk = f" {in_units(choice.chunk)}" if choice.chunk else ""
    streaming = " streaming" if choice.stores == "streaming" else ""
    if choice.past != one.cell.candidates[0].past:
        streaming += " past caches" if choice.past else " in caches"
    return f"{one.seconds(candidate) * 1e6:.1f}: {choice.algorithm}{chunk}{streaming}"


def check_place(path: Path) -> None:
    """Refuse a file that could not be written, before anything is measured.

    Raises:
        UsageError: The message says why it cannot.
    """
    other = "name another file with --output"
    if str(path).startswith("~"):
        raise UsageError(f"[tune] this user has no home to store it in; {other}")
    if path.exists() and not path.is_file():
        raise UsageError(f"[tune] {path} is no file that could be replaced; {other}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise UsageError(
            f"[tune] nothing can be stored in {path.parent}: {error.strerror}; {other}"
        ) from error


def store(outcomes: list[Outcome], path: Path) -> None:
    """Store the rows that the outcomes give, beside those of other transports and members."""
    before: tuple[Row, ...] = ()
    if path.exists():
        try:
            before = stored.read(path).stored
        except UsageError as error:
            print(f"[tune] what was stored is replaced: {error}", file=sys.stderr)
    rows = merged(outcomes, before)
    Table(tuple(rows), str(path))
    facts = {"cpu": _cpu(), "cores": len(own_cores()), "date": time.strftime("%Y-%m-%d %H:%M")}
    stored.write(path, rows, facts)
    better = sum(1 for one in outcomes if one.best)
    print(f"{better} of {len(outcomes)} choices can be bettered; stored in {path}")
    if path != stored.default_path():
        print(f"set ALLREDUCE_CHOICES={path.absolute()} on all ranks to use them")


def _cpu() -> str:
    """Return the model of this host's CPU."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else platform.machine()


def tune(
    ranks: Annotated[
        list[int] | None,
        typer.Option("--ranks", "-n", min=2, help="How many to start: 2, and one per core."),
    ] = None,
    transport: Annotated[
        str | None,
        typer.Option(help="shared or tcp; without it the job's, or shared."),
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="How long to measure, in all.")] = 40.0,
    output: Annotated[
        Path | None, typer.Option(help="Where to store; ALLREDUCE_CHOICES has to name it.")
    ] = None,
    report: Annotated[Path | None, typer.Option(hidden=True)] = None,
) -> None:
    """Measure this machine, and store the choices that do better here than the built-in ones."""
    if transport is not None and transport not in ALGORITHMS:
        raise typer.BadParameter(str(unknown_name("transport", transport, ALGORITHMS)))
    os.environ["ALLREDUCE_CHOICES"] = BUILT_IN  # what is compared with, whatever is stored
    rank = rank_of_several(os.environ)
    path = output or stored.default_path()
    try:
        if report is None and not rank:
            check_place(path)
        if rank is None:
            counts = sorted(set(ranks or (2, max(2, len(own_cores())))))
            outcomes = [
                one
                for count in counts
                for one in started(count, transport or "shared", seconds / len(counts))
            ]
        else:
            if ranks:
                raise UsageError("[tune] the ranks are there already: leave --ranks out")
            outcomes = measure(transport, seconds)
        if report is not None and rank == 0:
            report.write_text(json.dumps([asdict(one) for one in outcomes]))
        elif report is None and not rank:
            show(outcomes)
            store(outcomes, path)
    except (AllreduceError, OSError, subprocess.SubprocessError) as error:
        print(f"[tune] {error}" if "[tune]" not in str(error) else error, file=sys.stderr)
        raise typer.Exit(1) from error


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
app.command()(tune)

if __name__ == "__main__":
    app()
