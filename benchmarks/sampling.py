"""Where a rank's time in one collective goes, function by function.

    python benchmarks/sampling.py all_reduce --nbytes 1048576
    python benchmarks/sampling.py all_reduce --nbytes 262144 --ranks 8 --memory empty

As in collectives.py, ranks rewrite their inputs, meet in a barrier, and make the call, over and
over; Linux's `perf` samples all of that on rank 0, by the clock. Only calls copy and reduce: the
barrier waits, and what rewrites is NumPy's. The package strips what it compiles; built for this,
functions have names:

    pip install . -C cmake.build-type=RelWithDebInfo \\
      -C cmake.define.CMAKE_CXX_FLAGS_RELWITHDEBINFO="-O3 -DNDEBUG -g1"
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from measure.cases import COLLECTIVES, Array, Case
from measure.contest import EMPTY, ORDINARY, Contestant
from measure.jobs import run

# perf's: share, user or kernel, function; with columns of what it has not sampled
_ROW = re.compile(r"\s*([\d.]+)%\s+\[(.)\]\s+(.+?)(?:\s+-)*\s*$")
_NOISE = re.compile(r"allreduce::|avx2::|avx512::|baseline::|\(anonymous namespace\)::")
_SMALLEST_SHARE = 0.01
_BATCH_SECONDS = 0.2  # of rounds, between which the ranks agree on whether to go on


class Rounds:
    """Rewriting, meeting and calling, with the seconds that each of them took so far."""

    names = ("rewriting the input", "the barrier", "the call")

    def __init__(self, contestant: Contestant, source: Array) -> None:
        self._contestant, self._source = contestant, source
        self.taken: list[tuple[float, float, float]] = []

    def run(self, times: int) -> None:
        """Do so many rounds."""
        one, clock = self._contestant, time.perf_counter
        for _ in range(times):
            begun = clock()
            one.refill(self._source)
            written = clock()
            one.barrier()
            met = clock()
            one.call()
            self.taken.append((written - begun, met - written, clock() - met))


def take_part(options: argparse.Namespace) -> None:
    """Do rounds as one of the ranks; rank 0 is sampled, and reports."""
    from measure import ours

    from allreduce.comm import init

    with init(transport=options.transport) as comm:
        case = Case(options.collective, "float32", comm.size, options.nbytes)
        wanted = EMPTY if options.memory == "empty" else ORDINARY
        one = next(each for each in ours.contestants(comm, case) if each.name == wanted)
        rounds = Rounds(one, case.source(comm.rank))
        rounds.run(10)
        each = sum(map(sum, rounds.taken)) / 10
        batch = int(comm.broadcast_object(max(1, int(_BATCH_SECONDS / each))))
        rounds.run(batch)  # the first calls touch memory for the first time
        rounds.taken.clear()
        if comm.rank:
            while comm.broadcast_object(None):
                rounds.run(batch)
            return
        with tempfile.TemporaryDirectory() as folder:
            data = Path(folder) / "perf.data"
            record = ("perf", "record", "-q", "-e", "cpu-clock", "-F", "4000", "-o", str(data))
            whom = ("-p", str(os.getpid()), "--", "sleep", str(options.seconds))
            sampler = subprocess.Popen([*record, *whom])
            going = True
            while going:
                going = bool(comm.broadcast_object(sampler.poll() is None))
                if going:
                    rounds.run(batch)
            _report(rounds, data)


def _report(rounds: Rounds, data: Path) -> None:
    """Print the parts of a round's time."""
    report = subprocess.run(
        ["perf", "report", "-i", data, "--stdio", "--no-children", "--sort", "symbol"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    taken = np.array(rounds.taken) * 1e6
    means, medians = taken.mean(axis=0), np.median(taken, axis=0)
    for name, mean, median in zip(rounds.names, means, medians, strict=True):
        print(f"{mean:9.1f} us {name} (median {median:.1f})")
    found = shares(report)
    print("the functions of all three:" if found else "perf took no samples; try again")
    for share, name in found:
        print(f"{share * means.sum():9.1f} us {share:4.0%}  {name}")


def shares(report: str) -> list[tuple[float, str]]:
    """Parse perf's report: functions of 1 % and more, with their shares."""
    found = []
    for row in filter(None, map(_ROW.match, report.splitlines())):
        name = _NOISE.sub("", row[3]) + (" (kernel)" if row[2] == "k" else "")
        found.append((float(row[1]) / 100, name))
    return [(share, name) for share, name in found if share >= _SMALLEST_SHARE]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("collective", choices=COLLECTIVES)
    parser.add_argument("--nbytes", type=int, default=1 << 20, help="of a rank's input")
    parser.add_argument("--memory", choices=("ordinary", "empty"), default="ordinary")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=3.0)
    parser.add_argument("--transport", default="shared")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory == "empty" and options.transport != "shared":
        parser.error("only shared memory can be comm.empty's: leave --memory out, or --transport")
    if options.inside:
        take_part(options)
        return
    if shutil.which("perf") is None:
        sys.exit("sampling needs Linux's perf (the package linux-perf on Debian)")
    command = [sys.executable, "-m", "allreduce.run", "-n", str(options.ranks)]
    own = [str(Path(__file__).resolve()), *sys.argv[1:], "--inside"]
    print(run([[*command, *own]], environ={}, cwd=Path.cwd(), deadline=options.seconds + 60))


if __name__ == "__main__":
    main()
