"""Compare the speed of collectives with other libraries.

    mpirun -n 2 python benchmarks/collectives.py                  # beside this mpirun's MPI
    python benchmarks/collectives.py --peers                      # beside everybody, and so:
    python benchmarks/collectives.py --peers mpich gloo --ranks 2 8 --collectives all_gather
    python benchmarks/collectives.py --peers --dtypes float16 bfloat16
    python benchmarks/collectives.py --peers --transport tcp      # beside gloo and MLX's ring

Each run rewrites the inputs, meets in a barrier of the contestant's own kind, and times one call,
in place if it is an all_reduce or a broadcast; a run's time is the slowest rank's. Results are
checked. Ours runs on `comm.empty` memory and on ordinary NumPy arrays, the peers on ordinary ones.
An MPI alternates with us in the same processes, in another order each round; other libraries run
right after us. The probes measure the machine's limits: native code without a protocol, alternating
with the rest. One is of an all_reduce in memory that all ranks map; the other of private arrays,
which go through rings or are copied by the kernel: the fastest of several ways and chunks (of more
than two ranks, what copies by the kernel only). Figures of further peers, ranks and sizes are put
beside those that a file has with --add.

With --peers each library gets a virtual environment, created once, outside the checkout.
Sizes are those of one rank's input. float16 and bfloat16 are compared only with our float32.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from drive import drive
from measure.cases import COLLECTIVES, DTYPES, LEFT_OUT, Case, add_arguments, selected, size_name
from measure.contest import ORDINARY, PROBE, Contestant, Timing, dump, hold
from measure.environments import DEFAULT_FOLDER
from measure.revision import current
from peers import PEERS
from reports import comparison, report

if TYPE_CHECKING:
    from probe.probe import Probe

    from allreduce.comm import Communicator

_RESULTS = Path(__file__).resolve().parent / "results"


def take_part(options: argparse.Namespace) -> None:
    """Measure as one of the ranks that a launcher started; rank 0 reports."""
    from probe.probe import Probe

    from allreduce.comm import init, world

    with init(transport=options.transport) as comm:
        options.collectives = _possible(comm, options)
        by_mpi = world().source == "mpi"
        probe = Probe(comm) if comm.transport == "shared" else None
        slowest = partial(comm.all_reduce, op="max")
        timings: list[Timing] = []
        for case in selected(options, comm.size):
            contestants = _contestants(comm, case, options.dtypes, by_mpi, probe)
            timings += hold(contestants, comm.rank, options.seconds, slowest)
        if comm.rank != 0:
            return
        about, baseline = "no peer in these processes", ORDINARY
        if by_mpi:
            from peers import mpi

            about, baseline = mpi.version(), mpi.name()
        if options.timings:
            dump(timings, about, options.timings)
        else:
            show(timings, baseline, f"{comm.size} processes; {about}", options.out)


def _possible(comm: Communicator, options: argparse.Namespace) -> list[str]:
    """Return which of the wanted collectives the communicator has."""
    from measure import ours

    if comm.size == 1:
        raise SystemExit(
            "collectives.py: one rank has nobody to talk to; start several, as in "
            "mpirun -n 2 python benchmarks/collectives.py, or name --peers"
        )
    lacking = [dtype for dtype in options.dtypes if not ours.carries(dtype)]
    possible = [name for name in options.collectives if hasattr(comm, name)]
    if lacking or not possible:
        missing = ", ".join(lacking or options.collectives)
        raise SystemExit(f"collectives.py: our communicator does not know {missing}")
    for name in sorted({*options.collectives} - {*possible}) if comm.rank == 0 else ():
        print(f"{LEFT_OUT}our communicator does not know {name}", file=sys.stderr)
    return possible


def _contestants(
    comm: Communicator, case: Case, dtypes: Sequence[str], by_mpi: bool, probe: Probe | None
) -> list[Contestant]:
    """Make all that take turns in one case; a collective call."""
    from measure import ours

    made = []
    for dtype in dict.fromkeys(("float32", *dtypes)):
        made += ours.contestants(comm, replace(case, dtype=dtype))
    if by_mpi:
        from mpi4py import MPI
        from peers import mpi

        made.append(mpi.contestant(MPI.COMM_WORLD, case))
    return made + list(probe.contestants(case) if probe is not None else ())


def show(timings: Sequence[Timing], baseline: str, where: str, out: Path) -> None:
    """Print one job's timings, and write them to `out` with the suffixes .json and .png."""
    collectives = list(dict.fromkeys(timing.collective for timing in timings))
    title = f"{', '.join(collectives)}, float32 sum, {where}"
    medians = {(timing.place, comparison.label(timing)): timing.median for timing in timings}
    rows = []
    for timing in timings:
        size = size_name(timing.nbytes)
        limit = medians.get((timing.place, PROBE)) if timing.dtype == "float32" else None
        rows.append(
            report.Row(
                size if len(collectives) == 1 else f"{timing.collective} {size}",
                comparison.label(timing),
                timing.runs,
                timing.median,
                timing.p99,
                medians[timing.place, baseline] / timing.median,
                limit / timing.median if limit is not None else None,
            )
        )
    report.print_rows(rows, title)
    run = comparison.Run(baseline, where, timings, current())
    if any(timing.dtype != "float32" for timing in timings):
        comparison.print_types([run])
    figures = {"revision": asdict(run.revision), "rows": [asdict(row) for row in rows]}
    report.save(out, title, figures)
    comparison.draw(timings, out, title)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_arguments(parser)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["float32"])
    parser.add_argument("--transport", default="shared", help="ours")
    parser.add_argument("--out", type=Path, help="of the .json and .png (default: in results/)")
    parser.add_argument("--timings", type=Path, help="write them here as JSON, and report nothing")
    many = parser.add_argument_group("with several libraries")
    many.add_argument("--peers", nargs="*", choices=PEERS, help="beside whom; all without a name")
    many.add_argument("--ranks", type=int, nargs="+", default=[2], help="how many, one by one")
    many.add_argument("--add", action="store_true", help="keep the other figures in --out's file")
    many.add_argument("--environments", type=Path, default=DEFAULT_FOLDER, help="kept in here")
    many.add_argument("--deadline", type=float, default=1800, help="seconds that a job may take")
    options = parser.parse_args()
    if options.peers is None:
        options.collectives = options.collectives or ["all_reduce"]
        options.out = options.out or _RESULTS / "collectives"
        take_part(options)
    else:
        options.collectives = options.collectives or list(COLLECTIVES)
        name = "peers" if options.transport == "shared" else f"peers-{options.transport}"
        options.out = options.out or _RESULTS / name
        drive(options)


if __name__ == "__main__":
    main()
